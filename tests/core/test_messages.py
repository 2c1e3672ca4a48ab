"""Code that an error or a warning suggests: each call exists and takes what is written.

The messages are collected from the sources, so that a new one is checked without being listed. A
call of literals, such as a rule, is evaluated; of others the name and the arguments are checked.
"""

import ast
import builtins
import contextlib
import copy
import functools
import importlib
import inspect
import os
import pathlib
import re
import time
import types

import pytest

if os.environ["KERAS_BACKEND"] != "tensorflow":
    pytest.skip("the messages are the same on every backend", allow_module_level=True)

import accelerate
import jax
import keras
import optax
import tensorflow as tf
import tf_keras
import torch
import torch.distributed.fsdp
from flax import nnx

import lossscale.optax

MODULES = [
    importlib.import_module(f"lossscale{name}")
    for name in ("", ".optax", ".torch", ".diagnosis", ".keras", ".tf_keras")
]
FRAMEWORKS = {"tf": tf, "jax": jax, "keras": keras, "optax": optax, "torch": torch, "nnx": nnx}
PUBLIC = {name: getattr(m, name) for m in reversed(MODULES) for name in m.__all__}
NAMES = {**vars(builtins), **PUBLIC, **FRAMEWORKS, "tf_keras": tf_keras, "lossscale": lossscale}
WRAPPERS = [m.LossScaleOptimizer for m in (lossscale.keras, lossscale.tf_keras, lossscale.torch)]
# What a name in a suggestion stands for.
OWNERS = {
    "optimizer": [*WRAPPERS, torch.optim.Optimizer, keras.optimizers.Optimizer],
    "scaler": [lossscale.torch.GradScaler],
    "model": [keras.Model, torch.nn.Module, types.SimpleNamespace(optimizer=WRAPPERS[0])],
    # Of two optimizers, the state of one is given to the other.
    "old": [*WRAPPERS, lossscale.experimental.LossScale],
    "new": WRAPPERS,
    "monitor": [lossscale.torch.Monitor, lossscale.optax.Monitor],
    "new_model": [keras.Model],
    "tx": [optax.sgd(0.1)],
    "accelerator": [accelerate.Accelerator],
    "mesh": [torch.distributed.device_mesh.DeviceMesh],
    "loss": [torch.Tensor],
    "copy": [copy],
    "time": [time],
    "self": WRAPPERS,
    "opt_state": [lossscale.optax.LossScaleState],
    "strategy": [tf.distribute.Strategy],
}
METHODS = [cls for classes in OWNERS.values() for cls in classes]
METHODS += [torch.Tensor, torch.distributed.fsdp, optax.sgd(0.1)]
# The user's own.
YOURS = ("YourLayer(", "loss_fn(", "first_step(", "second_step(")


def messages():
    """The sentences in the sources, with `...` for what they are formatted with.

    Not docstrings, which have examples of their own that run, and not code that is executed.
    """
    for path in pathlib.Path(lossscale.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [part.value if isinstance(part, ast.Constant) else "..." for part in parts]
            if all(isinstance(text, str) for text in texts):
                text = "".join(texts)
                if "\n" not in text and re.search(r"[a-z]\. ?|: ", text):
                    yield text


def calls(text):
    """The calls in a message, as they stand there."""
    for found in re.finditer(r"(?<![\w.\"'\[])[A-Za-z_][\w.]*\(", text):
        rest = text[found.start() :]
        for end in (match.end() for match in re.finditer(r"\)", rest)):
            with contextlib.suppress(SyntaxError, ValueError):
                tree = ast.parse(rest[:end], mode="eval").body
                if isinstance(tree, ast.Call):
                    yield rest[:end], tree
                break


MESSAGES = sorted({*messages()})
SUGGESTED = {code: tree for text in MESSAGES for code, tree in calls(text)}


def resolved(code):
    """What the name of a call may stand for."""
    names = code.partition("(")[0].split(".")
    root, *rest = names
    owners = [NAMES[root]] if root in NAMES else OWNERS.get(root, [] if rest else METHODS)
    for owner in owners:
        with contextlib.suppress(AttributeError):
            yield functools.reduce(getattr, rest if root in {**NAMES, **OWNERS} else names, owner)


def takes(function, call):
    try:
        inspect.signature(function).bind_partial(*call.args, **{k.arg: k for k in call.keywords})
    except TypeError:
        return False
    except ValueError:
        # What is written in C has no signature.
        return callable(function)
    return True


def test_there_are_suggestions_and_quotations():
    assert len(SUGGESTED) > 60, SUGGESTED
    assert len(QUOTED) > 7


@pytest.mark.parametrize("code", [code for code in SUGGESTED if not code.startswith(YOURS)])
def test_suggested_code_is_right(code):
    call, found = SUGGESTED[code], list(resolved(code))
    assert found, "no such name"
    assert any(takes(function, call) for function in found), "no such arguments"
    literal = [*call.args, *(k.value for k in call.keywords)]
    names = {n.id for part in literal for n in ast.walk(part) if isinstance(n, ast.Name)}
    is_rule = code.startswith(("lossscale.DynamicScale", "DynamicScale", "FixedScale"))
    if is_rule and literal and not names and "..." not in code:
        eval(code, dict(NAMES))


PAGE = pathlib.Path(__file__).parents[2] / "docs" / "troubleshooting.md"
QUOTED = [
    " ".join(code.split())
    for code in re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", PAGE.read_text(encoding="utf-8"))
    if len(code.split()) > 4 and not code.startswith(("scheduler = ", "loss_scaled("))
]


def has(message, quoted):
    """Whether the words of a message have those of a quotation, with any word in a gap."""
    words, wanted = ([word.strip(".,:;") for word in text.split()] for text in (message, quoted))
    return any(
        all(
            a in (b, "") or re.search(r"\{\d\}", a)
            for a, b in zip(words[start:], wanted, strict=False)
        )
        for start in range(len(words) - len(wanted) + 1)
    )


@pytest.mark.parametrize("quoted", QUOTED)
def test_a_message_that_the_page_quotes_is_one_of_ours(quoted):
    assert any(has(message, quoted) for message in MESSAGES)
