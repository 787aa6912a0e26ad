"""Training operators that torch's own operators leave slow, as functions on tensors.

They are torch operators (``torch.ops.oxytorch``) with derivatives, autocast and shapes for the compiler, so
`torch.compile`, `torch.export` and `torch.func` take them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor

from . import _C

__all__ = [
    "PackedWeights",
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "batch_norm",
    "embedding",
    "geglu",
    "gelu",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "packed_attention",
    "rms_norm",
    "rotary",
    "swiglu",
]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window_before: int = -1,
    window_after: int = -1,
    soft_cap: float = 0.0,
    dropout: float = 0.0,
) -> Tensor:
    """Return ``softmax(query key^T scale + mask) value``, differentiable once.

    On a CPU, float32, bfloat16 and float16 take the kernel of this library: memory grows with the tokens, and results
    have the same bits for any number of threads. Scores and sums are float32. float64 and other devices take torch's
    own operators. Under autocast, the three are cast as for torch's attention.

    Parameters
    ----------
    query : Tensor
        Batch x heads x queries x width.
    key, value : Tensor
        Batch x key heads x keys x width, in the dtype and on the device of `query`. Heads are a multiple of key heads;
        consecutive heads share one.
    mask : Tensor, optional
        Added to the scores, or true where a pair is visible; broadcasts to batch x heads x queries x keys. One
        that is added and requires a gradient gets it, in its dtype, for two more products of the scores' size.
    causal : bool
        A query sees keys up to its own position, counted from the first of both.
    scale : float, optional
        Of the products; 1 / sqrt(width) where not given.
    window_before, window_after : int
        Keys a query sees before and after its own position; a negative number is no limit. `causal` is
        ``window_after=0``.
    soft_cap : float
        Where above 0, scores s become ``soft_cap * tanh(s / soft_cap)``.
    dropout : float
        Probability, below 1, that a weight is dropped; the others are divided by one less it. Pass 0 in evaluation.
        One number of torch's generator seeds a call; the kernel makes the rest by Philox, to 2^-16 of the probability,
        and keeps no mask for backward.

    Returns
    -------
    Tensor
        With the shape, dtype and layout of `query`; zeros for a query that sees nothing.

    Raises
    ------
    ValueError
        For shapes that do not fit, and a `dropout` that is not from 0 to below 1.
    TypeError
        For dtypes that differ.
    NotImplementedError
        For a mask that requires a gradient. A second derivative is refused in backward, by a RuntimeError.
    """
    return cast(
        Tensor,
        torch.ops.oxytorch.attention(
            query, key, value, mask, causal, scale, window_before, window_after, soft_cap, dropout
        ),
    )


def batch_norm(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    *,
    momentum: float = 0.1,
    eps: float = 1e-5,
    added: Tensor | None = None,
    relu: bool = False,
    pool: Sequence[int] = (),
) -> Tensor:
    """Return ``max_pool2d(relu(batch_norm(input) + added), pool)`` in training, differentiable.

    On the CPU, a dense matrix, or an image in channels_last, of float32, bfloat16 or float16 with weights of float32
    takes the kernel of this library, which reads the input twice, writes the result once, and keeps nothing but the
    input, and the result where something was added, for backward. Sums are float32 and float64, results have the same
    bits for any number of threads. Windows that do not fill the image, and everything else, take torch's own operators.

    Parameters
    ----------
    input : Tensor
        Batch x channels, or batch x channels x height x width.
    weight, bias : Tensor, optional
        Of each channel.
    running_mean, running_var : Tensor, optional
        Updated in place, as torch does.
    momentum : float
        Share of this batch in the running ones.
    eps : float
        Added to the variance.
    added : Tensor, optional
        Of the shape and dtype of `input`, added to what is normalized.
    relu : bool
        Negative results become zero.
    pool : sequence of int
        Size, or height and width, of windows that lie side by side, of which the largest elements are returned.

    Returns
    -------
    Tensor
        In the dtype and layout of `input`.

    Raises
    ------
    ValueError
        For shapes that do not fit.
    """
    return cast(
        Tensor,
        torch.ops.oxytorch.batch_norm(
            input, weight, bias, running_mean, running_var, momentum, eps, added, relu, list(pool)
        ),
    )


def embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """Return the rows of `weight` at the indices `input`: torch's embedding, differentiable any number of times.

    On a CPU, the gradient of a weight of float32, bfloat16 or float16 takes the kernel of this library: each row is
    the sum in fp32 of what belongs to it, in the order of `input`, rounded once. In float32 these are
    torch's bits; in 16 bits torch rounds after each addition, and loses what is small beside the sum. Results have the
    same bits for any number of threads. Beside the gradient it holds 16 bytes for each index. Everything else takes
    torch's operators.

    Parameters
    ----------
    input : Tensor
        Indices of rows, int64 or int32, of any shape.
    weight : Tensor
        Rows x columns.
    padding_idx : int, optional
        A row that gets no gradient, counted from the end where it is negative.

    Returns
    -------
    Tensor
        With the shape of `input` and columns, in the dtype of `weight`.

    Raises
    ------
    ValueError
        For a weight that is no matrix, and a `padding_idx` outside of it.
    TypeError
        For an `input` that is not of int64 or int32.
    IndexError
        For an index out of range.
    """
    return cast(Tensor, torch.ops.oxytorch.embedding(input, weight, padding_idx))


def gelu(input: Tensor, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """Return ``input * Phi(input)``, or its form by tanh; differentiable twice (Hendrycks, Gimpel, arXiv:1606.08415).

    On a CPU, float32, bfloat16 and float16 take the kernel of this library: float32 arithmetic, one rounding, the same
    bits for any number of threads. Everything else takes torch's own operators.

    Parameters
    ----------
    input : Tensor
        Any sizes.
    approximate : {"none", "tanh"}
        As of `torch.nn.functional.gelu`.

    Returns
    -------
    Tensor
        In the sizes, dtype and layout of `input`.

    Raises
    ------
    ValueError
        For another `approximate`.
    """
    return cast(Tensor, torch.ops.oxytorch.gelu(input, approximate))


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Return ``silu(gate) * up`` in one pass, differentiable twice (Shazeer, arXiv:2002.05202).

    Only the inputs are kept for backward, which makes both gradients in one pass. Kernel and bits as of `gelu`.

    Parameters
    ----------
    gate : Tensor
        Any sizes. Without `up`, its last dimension holds both side by side, the gate first.
    up : Tensor, optional
        In the sizes and dtype of `gate`.

    Returns
    -------
    Tensor
        In the sizes of `gate`; without `up`, of half its last dimension.

    Raises
    ------
    ValueError
        For sizes that differ, or a last dimension that has no halves.
    TypeError
        For dtypes that differ.
    """
    return cast(Tensor, torch.ops.oxytorch.swiglu(gate, up))


def geglu(gate: Tensor, up: Tensor | None = None, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """Return ``gelu(gate, approximate) * up`` in one pass; all else as of `swiglu`."""
    return cast(Tensor, torch.ops.oxytorch.geglu(gate, up, approximate))


def layer_norm(input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Return the layer normalization of the last dimension, differentiable twice (Ba et al., arXiv:1607.06450).

    On a CPU, float32, bfloat16 and float16 with weights of float32 or of their dtype take the kernel of this library:
    float32 arithmetic, the same bits for any number of threads. Everything else takes torch's own operators.

    Parameters
    ----------
    input : Tensor
        Any sizes x columns.
    weight, bias : Tensor, optional
        One for each column.
    eps : float
        Added to the variance.

    Returns
    -------
    Tensor
        In the sizes and dtype of `input`.

    Raises
    ------
    ValueError
        For sizes that do not fit.
    """
    return cast(Tensor, torch.ops.oxytorch.layer_norm(input, weight, bias, eps))


def rms_norm(input: Tensor, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Return the RMS normalization of the last dimension (Zhang and Sennrich, arXiv:1910.07467).

    `eps` is added to the mean square; without one it is that of `torch.nn.functional.rms_norm`. All else as of
    `layer_norm`.
    """
    return cast(Tensor, torch.ops.oxytorch.rms_norm(input, weight, eps))


def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the layer normalization of ``dropout(input) + residual``, and that sum, in one pass.

    Both gradients are made in one pass too. Of a transformer's block it is the end of one part and the beginning of the
    next: the sum goes on as the next residual.

    Parameters
    ----------
    input, residual : Tensor
        Any sizes x columns, the same of both. The dtypes may differ, as under autocast.
    weight, bias : Tensor, optional
        One for each column.
    eps : float
        Added to the variance.
    dropout : float
        Probability, below 1, that an element of `input` is dropped; the others are divided by one less it. The mask is
        the one that `torch.nn.functional.dropout` draws. Pass 0 in evaluation.

    Returns
    -------
    normed, sum : Tensor
        Both in the dtype of ``input + residual``.

    Raises
    ------
    ValueError
        For sizes that do not fit, and a `dropout` that is not from 0 to below 1.
    """
    return cast("tuple[Tensor, Tensor]", torch.ops.oxytorch.add_layer_norm(input, residual, weight, bias, eps, dropout))


def add_rms_norm(
    input: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float | None = None, *, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the RMS normalization of ``dropout(input) + residual``, and that sum; all else as of `add_layer_norm`."""
    return cast("tuple[Tensor, Tensor]", torch.ops.oxytorch.add_rms_norm(input, residual, weight, eps, dropout))


class PackedWeights(_C.ops.PackedWeights):
    """While entered, `linear` keeps the weights that it has laid out for its products.

    A weight is laid out anew only where it has changed. With few rows that takes as long as the products: it pays where
    the gradients of several small batches are accumulated between two steps of the optimizer. Bits stay what they are.
    It acts on the whole process, on linear layers that the strategy ``native_linear`` serves too, and takes 2 bytes for
    each element of a weight from its first forward on and 2 more from its first backward on. They are freed where the
    last one is left.

    A change is seen by the tensor's version, and, for writes that pass it by (through ``.data``), by 64 elements that
    are compared. Call `clear` after a write to few elements that passes it by.

    Examples
    --------
    >>> with ox.ops.PackedWeights():
    ...     for batch in window:
    ...         loss_of(model, batch).backward()
    """

    __slots__ = ()


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, relu: bool = False) -> Tensor:
    """Return ``input weight^T + bias``, with products of bfloat16 of a weight that stays float32.

    On a CPU that multiplies bfloat16, inputs of bfloat16 take the kernel of this library: a float32 weight is rounded
    as it is laid out for the products, sums and the bias are float32, and the gradients of weight and bias are the
    float32 sums themselves, which torch rounds to bfloat16 first. Results have the same bits for any number of threads.
    Everything else takes torch's own operators. Under autocast to bfloat16, `input` is cast and the others stay.

    Parameters
    ----------
    input : Tensor
        Any sizes x features.
    weight : Tensor
        Outputs x features, as of `torch.nn.Linear`, in the dtype of `input` or, where that is bfloat16, in float32.
    bias : Tensor, optional
        One for each output, in the dtype of `weight`.
    relu : bool
        Return the ReLU of that.

    Returns
    -------
    Tensor
        Sizes x outputs, in the dtype of `input`.

    Raises
    ------
    ValueError
        For sizes that do not fit.
    TypeError
        For other dtypes.
    """
    return cast(Tensor, torch.ops.oxytorch.linear(input, weight, bias, relu=relu))


def linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """Return ``cross_entropy(linear(input, weight, bias), target)`` without the logits, differentiable once.

    On a CPU, float32, bfloat16 and float16 take the kernel of this library: of the logits it holds those of 256 tokens
    at a time, in float32, and computes the gradients in the same pass, so that backward only multiplies them. Of at
    most 1,024 classes in bfloat16 it holds a million logits at a time, and the gradients of all, in bfloat16. Results
    have the same bits for any number of threads. Where an earlier batch left a gradient of `weight`, that of this one
    is added to it without a tensor of its size. Other devices do the same by torch's operators, without a read on the
    host; of the logits they hold about as many as `input` has elements, those of 256 tokens at least. float64 takes
    torch's own two operators. Autocast to bfloat16 casts `input` alone and leaves a float32 `weight` and `bias` as they
    are, so that their gradients are not rounded; other dtypes are cast as for torch's linear.

    Parameters
    ----------
    input : Tensor
        Any sizes x width.
    weight : Tensor
        Classes x width, as of `torch.nn.Linear`; of the dtype of `input`, or float32 where that is bfloat16.
    target : Tensor
        int64, with the sizes of `input` but the last.
    bias : Tensor, optional
        One for each class, of the dtype of `weight`.
    ignore_index : int
        Tokens of this target do not count.
    label_smoothing : float
        From 0 to 1.
    reduction : {"mean", "sum"}
        The mean is over the tokens that count; NaN where none does.

    Returns
    -------
    Tensor
        A number, float32 (float64 for inputs of float64).

    Raises
    ------
    ValueError
        For sizes or targets that do not fit.
    TypeError
        For dtypes that differ, or targets that are not int64.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; give 'mean' or 'sum'.")
    return cast(
        Tensor,
        torch.ops.oxytorch.linear_cross_entropy(
            input, weight, target, bias, ignore_index, label_smoothing, reduction == "mean"
        ),
    )


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    window_before: int = -1,
    window_after: int = -1,
    soft_cap: float = 0.0,
    dropout: float = 0.0,
) -> Tensor:
    """Return `attention` of documents whose tokens lie one after the other, without padding, differentiable once.

    Each query sees keys of its own document; memory grows with the tokens. What `attention` says of its kernel holds:
    a document has the bits that `attention` has of it alone, with dropout those of a sample of that number. float64 and
    other devices take torch's own operators, document by document, and read the offsets on the host.

    Parameters
    ----------
    query : Tensor
        Tokens x heads x width.
    key, value : Tensor
        Tokens x key heads x width, in the dtype and on the device of `query`. Heads are a multiple of key heads;
        consecutive heads share one.
    query_offsets : Tensor
        int64 or int32, on the CPU or on the device of `query`: where each document begins, and the number of tokens,
        as in ``cu_seqlens`` of flash-attn or the offsets of a jagged nested tensor. Documents may be empty.
    key_offsets : Tensor, optional
        The same of the keys; `query_offsets` where not given.
    causal : bool
        A query sees keys up to its own position, counted from the first query and the first key of its document.
    scale : float, optional
        Of the products; 1 / sqrt(width) where not given.
    window_before, window_after : int
        Keys a query sees before and after its own position; a negative number is no limit.
    soft_cap : float
        Where above 0, scores s become ``soft_cap * tanh(s / soft_cap)``.
    dropout : float
        As of `attention`.

    Returns
    -------
    Tensor
        With the shape, dtype and layout of `query`; zeros for a query that sees nothing.

    Raises
    ------
    ValueError
        For shapes that do not fit, for offsets that do not begin with 0, fall, do not end with the number of tokens or
        lie on another device, and for a `dropout` that is not from 0 to below 1.
    TypeError
        For dtypes that differ, and offsets that are not int64 or int32.
    """
    return cast(
        Tensor,
        torch.ops.oxytorch.packed_attention(
            query,
            key,
            value,
            query_offsets,
            key_offsets,
            causal,
            scale,
            window_before,
            window_after,
            soft_cap,
            dropout,
        ),
    )


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, rotary_dim: int | None = None) -> Tensor:
    """Return `x` with pairs of features (a, b) rotated to (a cos - b sin, b cos + a sin), differentiable.

    On a CPU, float32, bfloat16 and float16 take the kernel of this library: tables and arithmetic are float32, a result
    is rounded once, and results have the same bits for any number of threads. The gradient is the rotation back, by the
    same kernel. Everything else takes torch's own operators, in float32 for the 16-bit dtypes.

    Parameters
    ----------
    x : Tensor
        Batch x heads x tokens x width.
    cos, sin : Tensor
        Tokens x angles, batch x tokens x angles, or batch x heads x tokens x angles, where batch, heads and tokens may
        be 1. Angles are half of the rotated features, or as many: then each angle is there twice, as Hugging Face's
        tables have it, and one of the two is read. Of any floating dtype; they get no gradient.
    interleaved : bool
        A pair is two features side by side, as in RoFormer and GPT-J; else it is one of each half, as in GPT-NeoX and
        in LLaMA of Hugging Face.
    rotary_dim : int, optional
        Features that are rotated, the first ones; the others are copied. All where not given.

    Returns
    -------
    Tensor
        With the shape and dtype of `x`.

    Raises
    ------
    ValueError
        For sizes that do not fit.
    TypeError
        For dtypes that are not floating.
    NotImplementedError
        For tables that require a gradient.
    """
    return cast(Tensor, torch.ops.oxytorch.rotary(x, cos, sin, interleaved, rotary_dim))
