"""The transformer of `lib.model` by path expansion: the same loss and gradients, many times faster.

A token reaches the output along a path: a set S of layers whose attention moves it on, while the
other layers let it pass. Unrolling h <- h + A h V layer by layer gives the sum over all 2^m paths

    h^(m)  = sum_S A_S X V_S                     X one-hot inputs [T, V], A_S [T, T], V_S [V, V]
    scores = sum_S,S' A_S X (V_S W V_S'^T) X^T A_S'^T + position[lag]
    logits = sum_S A_S X (V_S W_O)

where A_S multiplies the attention matrices in S, later layers to the left, and V_S the value matrices,
earlier layers to the left. Two things make this fast.

- The products in brackets hold no data, and X only looks their entries up. So they are made once per
  step; every micro-batch adds to the sums of their gradients; one backward pass takes these on to the weights.
- A sequence has only U distinct tokens (about 90 of 200 in stories), so Z_S = A_S X needs U columns, not V.
  They are numbered by first appearance: a number is unseen before some position, and the output stage,
  the dearest, starts there. The path through no layer is no product at all but a look-up in W_O.

A sequence then costs about 2^L T U V multiplications instead of (2L+1) T V^2; the products cost V^3
times 1, 6, 25, 96 for L = 1, 2, 3, 4. It pays for many sequences, a large vocabulary and few layers.

Sets S are counted in binary, layer 1 the lowest bit. Sizes: n sequences in a micro-batch, P paths so far.
"""

import torch
from torch import Tensor

from lib.threads import in_threads

# Blocks of positions in the output stage: more save multiplications, fewer make larger products.
BLOCKS = 3
# What an automatic micro-batch works on: 8 MiB in float32 on a CPU, within its caches; off it, 1 GiB.
CPU_ELEMENTS, DEVICE_ELEMENTS = 2**21, 2**28


def loss_and_gradients(model, inputs: Tensor, targets: Tensor, *, micro_batch="auto"):
    """Mean loss in nats per token, and its gradient for every parameter: as `lib.model` has them.

    `inputs`, `targets` [N, T] of integers below V. `micro_batch` is the number of sequences worked on
    together ("auto": by memory); the sum is the same up to rounding. The loss stays on the device, and
    on CUDA nothing here waits for it. There, sums come in a varying order, hence with varying last
    digits, unless torch.use_deterministic_algorithms(True) is set.

    Returns (scalar tensor, {parameter name: gradient of the parameter's shape}).
    Raises ValueError for shapes that differ, an empty batch, or sequences longer than model.seq_len.
    """
    if inputs.shape != targets.shape or inputs.numel() == 0:
        raise ValueError(
            f"inputs {tuple(inputs.shape)} and targets {tuple(targets.shape)} must be alike and not empty."
        )
    if inputs.ndim != 2 or inputs.shape[1] > model.seq_len:
        raise ValueError(
            f"tokens must be [sequences, at most {model.seq_len} positions], got {tuple(inputs.shape)}."
        )
    tables = _Tables(model, inputs.shape[1])
    if micro_batch == "auto":
        micro_batch = _automatic(inputs, model.vocab_size, 2 ** len(model.layers))
    local, tokens, seen = distinct_tokens(inputs)
    loss = torch.zeros((), dtype=torch.float64, device=inputs.device)

    def work(chosen):
        return tables.work(*(each[chosen] for each in (inputs, local, tokens, seen, targets)))

    # Alike numbers together: less padding. What comes back is added in order: the same bits each time.
    for part, additions in in_threads(
        work, seen[:, -1].argsort().split(micro_batch), inputs.device
    ):
        loss += part
        for table, where, gradient in additions:
            table.add(where, gradient)
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = tables.backward(parameters, scale=1 / targets.numel())
    return (loss / targets.numel()).to(model.output.dtype), dict(zip(names, gradients, strict=True))


def along_paths(values, matrix: Tensor) -> list[Tensor]:
    """V_S @ `matrix` for every set S of the layers with these `values`, each made by one product."""
    products = [matrix]
    for value in reversed(values):
        products = [made for product in products for made in (product, value @ product)]
    return products


def distinct_tokens(inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens of each sequence of `inputs` [N, T], numbered by first appearance.

    Returns `local` [N, T], the number at each position; `tokens` [N, T], the token that has each
    number (0 beyond the last); `seen` [N, T], how many numbers are in use up to each position.
    """
    steps = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    ordered, where = inputs.sort(dim=1, stable=True)  # equal tokens together, earlier ones first
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    start = steps.where(starts, 0).cummax(dim=1).values
    first = torch.empty_like(where).scatter_(1, where, where.gather(1, start))
    seen = (first == steps).cumsum(dim=1)
    local = (seen - 1).gather(1, first)
    return local, torch.zeros_like(inputs).scatter_(1, local, inputs), seen


class _Table:
    """Products of weights, packed for look-up, and the sums of their gradients.

    `products` keep their autograd graph; `values` is their detached stack. It lies along dimension `dim`,
    so that one row, found by the `dim` indices before it, holds what all products have there.
    """

    def __init__(self, products: list[Tensor], dim: int, sums_dtype=None):
        self.products, self.dim = products, dim
        self.values = torch.stack([product.detach() for product in products], dim)
        self.sums = torch.zeros_like(self.values, dtype=sums_dtype)

    def rows(self, where: Tensor) -> Tensor:
        """The rows `where` (the indices before `dim`, flattened), each flattened too."""
        return self.values.flatten(0, self.dim - 1).flatten(1).index_select(0, where)

    def add(self, where: Tensor | None, gradient: Tensor) -> None:
        """Add the `gradient` of `rows(where)`, or of all values, to the sums."""
        if where is None:
            self.sums += gradient
            return
        sums = self.sums.flatten(0, self.dim - 1).flatten(1)
        sums.index_add_(0, where, gradient.to(sums.dtype))


class _Tables:
    """Everything that a step looks up.

    For each layer with P paths before it: `scores` [query, key, P * P], entries of V_S W V_S'^T at
    S' * P + S, and `biases` [1, T, T], the position's part of the scores, minus infinity for the future.
    `direct` [current, 1, next]: W_O, the path through no layer, and `moved` [history, 2^L - 1, next]:
    V_S W_O of all others.
    """

    def __init__(self, model, seq_len: int):
        values = [layer.value for layer in model.layers]
        steps = torch.arange(seq_len, device=model.output.device)
        lag = steps[:, None] - steps[None, :]
        self.scores, self.biases = [], []
        for index, layer in enumerate(model.layers):
            before = values[:index]
            by_key = along_paths(before, layer.query_key.mT)  # [key, hidden] for each S'
            pairs = [pair for keys in by_key for pair in along_paths(before, keys.mT)]
            self.scores.append(_Table(pairs, dim=2))
            bias = layer.position[lag.clamp(min=0)].masked_fill(lag < 0, float("-inf"))
            self.biases.append(_Table([bias], dim=0))
        direct, *moved = along_paths(values, model.output)
        self.moved = _Table(moved, dim=1)
        # Many small addends of one sign: float32 would drift by more than 1e-5 in large batches.
        self.direct = _Table([direct], dim=1, sums_dtype=torch.float64)

    def backward(self, parameters, scale: float):
        """The gradients of `parameters`: the sums, times `scale`, taken back through the products."""
        products, sums = [], []
        for table in [*self.scores, *self.biases, self.direct, self.moved]:
            table.values = None  # its memory is needed now
            products += table.products
            sums += table.sums.mul_(scale).to(parameters[0].dtype).unbind(table.dim)
        return torch.autograd.grad(products, parameters, sums)

    def work(self, inputs, local, tokens, seen, targets):
        """Loss in nats, summed over a micro-batch, and the (table, rows, gradient) that it adds.

        `inputs`, `targets` [n, T] and `local`, `tokens`, `seen` [n, T] from `distinct_tokens`.
        """
        vocab_size = len(self.direct.values)
        blocks = _blocks(seen, vocab_size)
        (n, length), size = local.shape, blocks[-1][2]
        tokens = tokens[:, :size]
        pairs = (tokens[:, :, None] * vocab_size + tokens[:, None, :]).flatten()
        reached = self.direct.values.new_zeros(n, length, size, 1)  # Z [n, T, U, P], P = 1
        reached.scatter_(2, local[..., None, None], 1)
        leaves = []
        for scores, biases in zip(self.scores, self.biases, strict=True):
            entries = scores.rows(pairs).requires_grad_()  # [n * U * U, P * P]
            bias = biases.values.clone().requires_grad_()
            leaves += [entries, bias]
            paths = reached.shape[3]
            between = entries.view(n, size, size, paths, paths).permute(0, 1, 4, 2, 3)
            between = between.reshape(n, size * paths, size * paths)  # [query and S, key and S']
            z = reached.flatten(2)  # [n, T, U * P]
            attention = (z @ between @ z.mT + bias).softmax(dim=-1)
            reached = torch.cat([reached, (attention @ z).view_as(reached)], dim=3)
        moved = reached[..., 1:].flatten(2)
        loss, gradient, additions = self._output(
            moved.detach(), inputs, local, tokens, targets, blocks
        )
        gradients = torch.autograd.grad(moved, leaves, gradient)
        for scores, biases in zip(self.scores, self.biases, strict=True):
            entries, bias, *gradients = gradients
            additions += [(scores, pairs, entries), (biases, None, bias)]
        return loss, additions

    def _output(self, z, inputs, local, tokens, targets, blocks):
        """The output stage: loss, gradient of `z` [n, T, U * P], and what `work` returns for its tables."""
        n, size = tokens.shape
        paths, vocab_size = self.moved.values.shape[1:]
        rows = self.moved.rows(tokens.flatten()).view(n, size * paths, vocab_size)
        logits = self.direct.rows(inputs.flatten()).view(*inputs.shape, vocab_size)
        for start, first, last in blocks:
            new = slice(first * paths, last * paths)
            logits[:, start:].baddbmm_(z[:, start:, new], rows[:, new])
        target = targets[..., None]
        chosen, largest = logits.gather(2, target), logits.amax(dim=-1, keepdim=True)
        error = logits.sub_(largest).exp_()  # in place, and one exponential for loss and gradient
        total = error.sum(dim=-1, keepdim=True)
        chosen -= largest + total.log()
        # Probabilities minus one-hot targets: the loss's gradient at the logits.
        error.mul_(1 / total).scatter_(2, target, chosen.expm1())

        gradient, to_rows = torch.zeros_like(z), torch.empty_like(rows)
        for start, first, last in blocks:
            new = slice(first * paths, last * paths)
            gradient[:, start:, new] = error[:, start:] @ rows[:, new].mT
            torch.bmm(z[:, start:, new].mT, error[:, start:], out=to_rows[:, new])
        # A sequence's errors are first summed by token, again because float32 drifts.
        by_token = error.new_zeros(n * size, vocab_size)
        place = local + size * torch.arange(n, device=local.device)[:, None]
        by_token.index_add_(0, place.flatten(), error.flatten(0, 1))
        where = tokens.flatten()
        additions = [
            (self.moved, where, to_rows.view(n * size, -1)),
            (self.direct, where, by_token),
        ]
        return -chosen.sum(dtype=torch.float64), gradient, additions


def _automatic(inputs: Tensor, vocab_size: int, paths: int) -> int:
    """Sequences in a micro-batch, from the elements of the largest tensors that one sequence needs."""
    length = inputs.shape[1]
    needed = paths * min(length, vocab_size) * vocab_size + length * (vocab_size + paths * length)
    allowed = CPU_ELEMENTS if inputs.device.type == "cpu" else DEVICE_ELEMENTS
    return max(1, allowed // needed)


def _blocks(seen: Tensor, vocab_size: int) -> list[tuple[int, int, int]]:
    """For each block of positions: its start, and the range of the numbers that are new in it.

    That is: from the start on, some sequence may use the numbers `first`..`last` - 1, none before. Off the
    CPU a bound stands for what the data say: looking at them would wait for the device.
    """
    length = seen.shape[1]
    ends = sorted({-(-length * block // BLOCKS) for block in range(1, BLOCKS + 1)})
    if seen.device.type == "cpu":
        used = [int(seen[:, end - 1].max()) for end in ends]
    else:
        used = [min(end, vocab_size) for end in ends]
    return list(zip([0, *ends], [0, *used], used, strict=False))
