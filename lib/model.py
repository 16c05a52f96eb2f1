"""The attention-only transformer of the paper, written to be read.

Every matrix is vocabulary by vocabulary and stands in one-hot space; a row vector times a matrix is
the only convention. Source: Im, Oh, Fang and Li (2026), section 3.2, as the article restates it.
"""

import torch
from torch import Tensor, nn

MICRO_BATCH_ELEMENTS = 2**23  # of one hidden state per micro-batch: 32 MiB in float32


class Layer(nn.Module):
    """One attention layer: what to look for, what to send, and how far back.

    Parameters: `query_key` [query, key] (the product W_Q W_K^T), `value` [history, hidden]
    (W_V W_O of a head, the OV circuit), `position` [lag] (added to score(t, k) at lag t - k).
    """

    def __init__(self, vocab_size: int, seq_len: int):
        super().__init__()
        self.query_key = nn.Parameter(torch.zeros(vocab_size, vocab_size))
        self.value = nn.Parameter(torch.zeros(vocab_size, vocab_size))
        self.position = nn.Parameter(torch.zeros(seq_len))

    def attention(self, hidden: Tensor) -> Tensor:
        """Causal attention probabilities [N, T, T] (row = query position) of `hidden` [N, T, V]."""
        steps = torch.arange(hidden.shape[1], device=hidden.device)
        lag = steps[:, None] - steps[None, :]  # [T, T], negative above the diagonal: the future
        scores = hidden @ self.query_key @ hidden.mT + self.position[lag.clamp(min=0)]
        return scores.masked_fill(lag < 0, float("-inf")).softmax(dim=-1)

    def forward(self, hidden: Tensor) -> Tensor:
        """`hidden` [N, T, V] with this layer's messages added to the residual stream."""
        return hidden + self.attention(hidden) @ hidden @ self.value


class AttentionOnlyTransformer(nn.Module):
    """L attention layers on a residual stream of one-hot tokens, then the output matrix.

    Arguments: `vocab_size` V, `seq_len` T (the longest input), `num_layers` L, `init_std` the
    standard deviation of a Gaussian initialisation (0: all parameters exactly zero), `seed` for it.
    Parameters: `output` [hidden, next] and `layers[i].query_key / value / position`. Note that
    TransformerLens calls our `output` W_U; its W_O is the second half of our `value`.

    Raises ValueError for sizes below 1 or a negative `init_std`.
    """

    def __init__(self, vocab_size: int, seq_len: int, num_layers: int, *, init_std=0.0, seed=0):
        super().__init__()
        for name, size in {
            "vocab_size": vocab_size,
            "seq_len": seq_len,
            "num_layers": num_layers,
        }.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}.")
        if not init_std >= 0:
            raise ValueError(f"init_std must be zero or positive, got {init_std}.")
        self.vocab_size, self.seq_len = vocab_size, seq_len
        self.layers = nn.ModuleList(Layer(vocab_size, seq_len) for _ in range(num_layers))
        self.output = nn.Parameter(torch.zeros(vocab_size, vocab_size))
        if init_std > 0:
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.normal_(0.0, init_std, generator=generator)

    def embed(self, tokens: Tensor) -> Tensor:
        """One-hot rows [N, T, V] of `tokens` [N, T]; raises ValueError for a wrong shape."""
        if tokens.ndim != 2 or tokens.shape[1] > self.seq_len:
            raise ValueError(
                f"tokens must be [sequences, at most {self.seq_len} positions], got {tuple(tokens.shape)}."
            )
        return nn.functional.one_hot(tokens, self.vocab_size).to(self.output.dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """Next-token logits [N, T, V] of `tokens` [N, T] (integers below V)."""
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden @ self.output

    def attention(self, tokens: Tensor) -> Tensor:
        """Attention probabilities [L, N, T, T] of every layer (row = query position)."""
        hidden, maps = self.embed(tokens), []
        for layer in self.layers:
            maps.append(layer.attention(hidden))
            hidden = layer(hidden)
        return torch.stack(maps)


def token_loss(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy in nats of `logits` [N, T, V] against `targets` [N, T]; mean is per token."""
    no_target = -(2**63)  # torch passes over -100 unless told another; here every target counts
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction=reduction, ignore_index=no_target
    )


def loss_and_gradients(model, inputs: Tensor, targets: Tensor, *, micro_batch="auto"):
    """Mean loss in nats per token, and its gradient for every parameter.

    `inputs`, `targets` [N, T]. The batch is worked through in micro-batches of `micro_batch`
    sequences ("auto": what keeps a hidden state near 32 MiB); the sum is the same, the memory
    is that of one micro-batch. The loss stays on the device: reading it is the caller's choice.

    Returns (scalar tensor, {parameter name: gradient of the parameter's shape}).
    Raises ValueError for shapes that differ or an empty batch.
    """
    if inputs.shape != targets.shape or inputs.numel() == 0:
        raise ValueError(
            f"inputs {tuple(inputs.shape)} and targets {tuple(targets.shape)} must be alike and not empty."
        )
    if micro_batch == "auto":
        micro_batch = max(1, MICRO_BATCH_ELEMENTS // (inputs.shape[1] * model.vocab_size))
    names, parameters = zip(*model.named_parameters(), strict=True)
    total, gradients = None, None
    for x, y in zip(inputs.split(micro_batch), targets.split(micro_batch), strict=True):
        loss = token_loss(model(x), y, reduction="sum") / targets.numel()
        part = torch.autograd.grad(loss, parameters)
        if gradients is None:
            total, gradients = loss.detach(), list(part)
        else:
            total += loss.detach()
            for gradient, more in zip(gradients, part, strict=True):
                gradient += more
    return total, dict(zip(names, gradients, strict=True))
