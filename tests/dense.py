"""The definitions of DESIGN written with one-hot matrices and loops: slow, and a witness apart from lib."""

import torch
from torch.nn.functional import one_hot

from lib.model import AttentionOnlyTransformer, loss_and_gradients


def irregular_tokens(num_sequences=9, seq_len=5, vocab_size=7, seed=0):
    """Tokens [N, T + 1] with uneven frequencies, every token present, all sizes different."""
    generator = torch.Generator().manual_seed(seed)
    weights = 1.0 / torch.arange(1, vocab_size + 1)
    drawn = torch.multinomial(
        weights.expand(num_sequences, -1), seq_len + 1, replacement=True, generator=generator
    )
    drawn.view(-1)[:vocab_size] = torch.arange(vocab_size).flip(0)
    return drawn


def split(tokens):
    """Inputs and targets [N, T] of tokens [N, T + 1]."""
    return tokens[:, :-1], tokens[:, 1:]


def statistics(inputs, targets, vocab_size):
    """bigram, context, query-key term and position term by their one-hot definitions (float64)."""
    sequences, length = inputs.shape
    x, r = (
        one_hot(inputs, vocab_size).double(),
        one_hot(targets, vocab_size).double() - 1 / vocab_size,
    )
    t = torch.arange(1, length + 1).double()[:, None]
    causal = torch.ones(length, length).tril().double()
    count = sequences * length
    bigram = torch.einsum("nta,ntb->ab", x, r) / count
    context = torch.einsum("nta,tk,nkb->ab", r, causal / t, x) / count
    scores = r @ bigram.T @ bigram @ context @ x.mT
    centred = (scores - (scores * causal).sum(-1, keepdim=True) / t) / t * causal
    query_key = torch.einsum("nta,ntk,nkb->ab", x, centred, x) / count
    position = torch.stack([centred.diagonal(-lag, 1, 2).sum() for lag in range(length)]) / count
    return {
        "bigram": bigram,
        "context": context,
        "query_key_term": query_key,
        "position_term": position,
    }


def trained(tokens, vocab_size, num_layers, learning_rate, steps):
    """The model after `steps` full-batch steps from zero on (inputs, targets), in float64."""
    model = AttentionOnlyTransformer(vocab_size, tokens[0].shape[1], num_layers).double()
    for _ in range(steps):
        _, gradients = loss_and_gradients(model, *tokens)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= learning_rate * gradients[name]
    return model
