"""The operators, one file per family; importing this package fills the table."""

from tilewright.capture.onnx.values import host

from . import (
    activation,
    attention,
    cast,
    index,
    loss,
    math,
    nn,
    norm,
    pool,
    quant,
    random,
    reduce,
    resize,
    rnn,
    sequence,
    shape,
    signal,
    vision,
)

__all__ = [
    "activation",
    "attention",
    "cast",
    "host",
    "index",
    "loss",
    "math",
    "nn",
    "norm",
    "pool",
    "quant",
    "random",
    "reduce",
    "resize",
    "rnn",
    "sequence",
    "shape",
    "signal",
    "vision",
]
