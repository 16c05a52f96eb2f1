"""Leading Terms: the model, its training and the corpus statistics behind the book."""
