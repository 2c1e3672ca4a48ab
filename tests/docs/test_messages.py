"""Code that an error or a warning suggests: each call exists and takes what is written.

The messages are collected from the sources, so that a new one is checked without being listed. A
call of literals, such as a rule, is evaluated; of others the name and the arguments are checked.
"""

import ast
import builtins
import contextlib
import copy
import importlib
import inspect
import os
import pathlib
import re

import pytest

SOURCES = sorted(pathlib.Path(__file__).parents[2].joinpath("src/lossscale").rglob("*.py"))
if os.environ["KERAS_BACKEND"] != "tensorflow":
    pytest.skip("the messages are the same on every backend", allow_module_level=True)

import accelerate  # noqa: E402
import jax  # noqa: E402
import keras  # noqa: E402
import optax  # noqa: E402
import tensorflow as tf  # noqa: E402
import tf_keras  # noqa: E402
import torch  # noqa: E402
import torch.distributed.fsdp  # noqa: E402

import lossscale.optax  # noqa: E402

MODULES = [
    importlib.import_module(f"lossscale{name}")
    for name in ("", ".optax", ".torch", ".migration", ".diagnosis", ".keras", ".tf_keras")
]
FRAMEWORKS = {"tf": tf, "jax": jax, "keras": keras, "optax": optax, "torch": torch}
PUBLIC = {name: getattr(m, name) for m in reversed(MODULES) for name in m.__all__}
NAMES = {**vars(builtins), **PUBLIC, **FRAMEWORKS, "tf_keras": tf_keras, "lossscale": lossscale}
WRAPPERS = [m.LossScaleOptimizer for m in (lossscale.keras, lossscale.tf_keras, lossscale.torch)]
# What a name in a suggestion stands for.
OWNERS = {
    "optimizer": [*WRAPPERS, torch.optim.Optimizer, keras.optimizers.Optimizer],
    "scaler": [lossscale.torch.GradScaler],
    "model": [keras.Model, torch.nn.Module],
    "monitor": [lossscale.torch.Monitor, lossscale.optax.Monitor],
    "new_model": [keras.Model],
    "tx": [optax.sgd(0.1)],
    "accelerator": [accelerate.Accelerator],
    "mesh": [torch.distributed.device_mesh.DeviceMesh],
    "loss": [torch.Tensor],
    "copy": [copy],
    "self": WRAPPERS,
    "strategy": [tf.distribute.Strategy],
}
METHODS = [cls for classes in OWNERS.values() for cls in classes]
METHODS += [torch.Tensor, torch.distributed.fsdp, optax.sgd(0.1)]
# The user's own.
YOURS = ("YourLayer(", "loss_fn(")


def messages(tree):
    """The texts in errors and warnings, and in constants and functions that hold them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                part.value if isinstance(part, ast.Constant) else "..." for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def is_sentence(text):
    # Not docstrings, which have examples of their own that run, and not code that is executed.
    return "\n" not in text and re.search(r"[a-z]\. ?|: ", text)


def calls(text):
    """The calls in a message, as they stand there."""
    for found in re.finditer(r"(?<![\w.\"'\[])[A-Za-z_][\w.]*\(", text):
        for end in (m.end() for m in re.finditer(r"\)", text[found.start() :])):
            with contextlib.suppress(SyntaxError, ValueError):
                tree = ast.parse(text[found.start() :][:end], mode="eval").body
                if isinstance(tree, ast.Call):
                    yield text[found.start() :][:end], tree
                break


SUGGESTED = sorted(
    {
        code
        for path in SOURCES
        for text in messages(ast.parse(path.read_text(encoding="utf-8")))
        if is_sentence(text)
        for code, _ in calls(text)
        if not code.startswith(YOURS)
    }
)


def resolved(code):
    """What the name of a call may stand for."""
    root, *rest = code.partition("(")[0].split(".")
    for owner in [NAMES[root]] if root in NAMES else OWNERS.get(root, [] if rest else METHODS):
        with contextlib.suppress(AttributeError):
            found = owner
            for name in rest if root in NAMES or root in OWNERS else [root]:
                found = getattr(found, name)
            yield found


def takes(function, call):
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind_partial(*call.args, **{k.arg: k for k in call.keywords})
    except TypeError:
        return False
    except ValueError:
        # What is written in C has no signature.
        return True
    return True


def test_there_are_suggestions():
    assert len(SUGGESTED) > 60, SUGGESTED


@pytest.mark.parametrize("code", SUGGESTED)
def test_suggested_code_is_right(code):
    (call,) = (tree for text, tree in calls(code) if text == code)
    found = list(resolved(code))
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


def test_the_page_quotes_messages():
    assert len(QUOTED) > 7


def has(message, quoted):
    """Whether the words of a message have those of a quotation, with any word in a gap."""
    words, wanted = ([word.strip(".,:;") for word in text.split()] for text in (message, quoted))
    return any(
        all(a == b or a == "" or re.search(r"\{\d\}", a) for a, b in zip(part, wanted, strict=True))
        for start in range(len(words) - len(wanted) + 1)
        for part in [words[start : start + len(wanted)]]
    )


@pytest.mark.parametrize("quoted", QUOTED)
def test_a_message_that_the_page_quotes_is_one_of_ours(quoted):
    assert any(
        has(message, quoted)
        for path in SOURCES
        for message in messages(ast.parse(path.read_text(encoding="utf-8")))
        if is_sentence(message)
    )
