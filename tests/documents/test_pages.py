"""Runs the code of the documentation pages, which stand beside the checkout and not in it.

A block's text is run as it is, one that goes on from the one before in its namespace. What a page
leaves open is supplied: names that no block defines (`_open_names`), and for `...`, which a page
writes for what the reader has to fill in, an expression of `_FILLED`.
"""

import ast
import contextlib
import doctest
import io
import pathlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import lossscale
from documents.pages import blocks
from lossscale import experimental

_PAGES = pathlib.Path(__file__).parents[2].parent / "shared" / "seeds"

if not _PAGES.is_dir():
    pytest.skip("the documentation pages are not beside this checkout", allow_module_level=True)

# The runnable blocks of each page in order, and its signatures. A block that is missing here, or
# too many, fails.
_RUNNABLE = {
    "000": ["pseudocode", "minimize", "tape", "get_weights", "set_weights"],
    "001": ["pseudocode", "minimize", "tape"],
    "002": ["pseudocode", "minimize_printed", "tape_printed", "aggregated"],
    "003": ["minimize_shown", "tape_continued"],
    "004": ["pseudocode", "minimize", "tape"],
}
_SIGNATURES = {"000": 16, "001": 16, "002": 0, "003": 0, "004": 4}

_FILLED = {
    # Where `...` stands: the target of an assignment, or the arguments of a call.
    "loss": "loss_fn()",
    "vars": "[var]",
    "LossScaleOptimizer": "tf.keras.optimizers.SGD(0.25), 'dynamic'",
}


def _text(page):
    (path,) = _PAGES.glob(f"{page}_*.txt")
    return path.read_text(encoding="utf-8")


def _code(page):
    """The text of each runnable block, by its name."""
    texts = [block.text for block in blocks(_text(page)) if block.kind != "signature"]
    return dict(zip(_RUNNABLE[page], texts, strict=True))


def _signatures(page):
    return [block.text for block in blocks(_text(page)) if block.kind == "signature"]


class _Fill(ast.NodeTransformer):
    """Replaces each `...` by an expression of `_FILLED`."""

    def visit_Assign(self, node):
        if _is_open(node.value):
            node.value = ast.parse(_FILLED[node.targets[0].id], mode="eval").body
        return self.generic_visit(node)

    def visit_Call(self, node):
        if any(_is_open(argument) for argument in node.args):
            assert len(node.args) == 1
            node.args = ast.parse(f"f({_FILLED[node.func.attr]})", mode="eval").body.args
        return self.generic_visit(node)


def _is_open(node):
    return isinstance(node, ast.Constant) and node.value is Ellipsis


def _parsed(text):
    tree = ast.fix_missing_locations(_Fill().visit(ast.parse(text)))
    assert not any(_is_open(node) for node in ast.walk(tree))
    return tree.body


def _run(text, namespace):
    """Runs a block; a constant that stands alone is the printed value of the line before."""
    value, shown = None, []
    for statement in _parsed(text):
        match statement:
            case ast.Expr(ast.Constant(documented)):
                assert value == documented
                shown.append(documented)
            case ast.Expr(expression):
                value = eval(compile(ast.Expression(expression), "<page>", "eval"), namespace)
            case _:
                exec(compile(ast.Module([statement], type_ignores=[]), "<page>", "exec"), namespace)
    return shown


def _open_names():
    """Names that the pages use and define nowhere."""
    var = tf.Variable(1.0)
    return {"tf": tf, "np": np, "var": var, "loss_fn": lambda: var**2}


@pytest.fixture(autouse=True)
def _nothing_is_logged(_tensorflow_logs):
    yield
    # The tests themselves make a function in a loop.
    own = [
        m for m in _tensorflow_logs if "triggered tf.function retracing" in m and "<locals>" in m
    ]
    assert [m for m in _tensorflow_logs if m not in own] == []


@pytest.fixture(autouse=True)
def _installed():
    with lossscale.install():
        yield


# The value of the variable, the number of steps, and the values that the page prints.
_STEPS = {
    "minimize": (np.float32(0.8), 1, []),
    "minimize_shown": (0.5, 1, []),
    "minimize_printed": (0.5, 1, [0.5]),
    "tape": (0.5, 1, []),
    "tape_continued": (0.25, 2, []),
    "tape_printed": (0.25, 2, [0.25]),
}


@pytest.mark.parametrize(
    ("page", "name"),
    [(page, name) for page, names in _RUNNABLE.items() for name in names if name in _STEPS],
)
def test_a_step_runs_unedited_with_the_documented_result(page, name):
    code, (value, iterations, printed) = _code(page), _STEPS[name]
    # The pages that show values leave no name open.
    namespace = _open_names() if name in ("minimize", "tape") else {"tf": tf, "np": np}
    if iterations == 2:
        (before,) = (text for other, text in code.items() if other.startswith("minimize"))
        _run(before, namespace)
        assert namespace["var"].numpy() == 0.5
    assert _run(code[name], namespace) == printed
    opt = namespace["opt"]
    assert namespace["var"].numpy() == value
    assert opt.iterations == iterations
    if name == "tape":
        assert namespace["scaled_loss"].numpy() == 2.0**15
        assert [float(g) for g in namespace["scaled_grads"]] == [2.0**16]
        assert [float(g) for g in namespace["grads"]] == [2.0]
        assert opt.loss_scale._bound_state().variables["good_steps"] == 1
        assert isinstance(opt, experimental.LossScaleOptimizer)


def _pseudocode(block):
    mixed_precision = tf.keras.mixed_precision
    older = mixed_precision.experimental.LossScaleOptimizer(keras.optimizers.SGD(), 1024)
    newer = mixed_precision.LossScaleOptimizer(keras.optimizers.SGD())
    for optimizer, loss_scale in ((older, older.loss_scale()), (newer, newer.loss_scale)):
        namespace = _open_names()
        # The function that the pseudocode means; it works in the graph of a tf.function.
        namespace |= {"gradients": tf.gradients, "loss_scale": loss_scale}
        namespace["vars"] = namespace["var"]
        np.testing.assert_array_equal(_gradients_of_pseudocode(block, namespace), [2.0])
        # What the pseudocode describes is what the optimizer does.
        (ours,) = optimizer.get_gradients(namespace["loss_fn"], [namespace["var"]])
        assert ours == 2.0


def _gradients_of_pseudocode(block, namespace):
    @tf.function(autograph=False)
    def gradients():
        _run(block, namespace)
        return namespace["grads"]

    return gradients()


def _aggregated(block):
    namespace = _open_names()
    optimizer = tf.keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.25))
    with tf.GradientTape() as tape:
        loss = namespace["loss_fn"]()
    namespace |= {"optimizer": optimizer, "tape": tape, "loss": loss, "vars": [namespace["var"]]}
    # The page inherited this block from optimizers without loss scaling: the loss in it is not
    # scaled, and that is what the warning says.
    with pytest.warns(lossscale.LossScaleWarning, match="the loss was never scaled"):
        _run(block, namespace)
    assert namespace["var"].numpy() == 0.5
    assert optimizer.iterations == 1


_WRAPPED = (
    "tf.keras.mixed_precision.LossScaleOptimizer({})",
    "tf.keras.mixed_precision.experimental.LossScaleOptimizer({}, 'dynamic')",
)


def _once_it_is_wrapped(block):
    """Runs a doctest of the page with the smallest change; yields its optimizer.

    Its optimizer is not wrapped, and Keras' own has no `get_weights`. Keras 3 takes labels of shape
    (5,) as they are, where older Keras reshaped them to (5, 1).
    """
    plain, labels = "tf.keras.optimizers.RMSprop()", "np.zeros(5)"
    assert block.count(plain) == block.count(labels) == 1
    checker, options = doctest.OutputChecker(), doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    for optimizer in _WRAPPED:
        namespace = _open_names()
        text = block.replace(plain, optimizer.format(plain)).replace(labels, "np.zeros((5, 10))")
        for example in doctest.DocTestParser().get_examples(text):
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(example.source, "<page>", "single"), namespace)
            # Keras 3 shows its variables in its own way; the value is the documented one.
            shown = r"<Variable .*shape=\(\), dtype=int64, value=10>\n"
            if not re.fullmatch(shown, printed.getvalue()):
                assert checker.check_output(example.want, printed.getvalue(), options)
        yield namespace["opt"]


def _get_weights(block):
    for opt in _once_it_is_wrapped(block):
        iterations, *squares = opt.get_weights()
        assert iterations == 1
        assert [value.shape for value in squares] == [(20, 10), (10,)]


def _set_weights(block):
    for opt in _once_it_is_wrapped(block):
        assert int(opt.iterations) == 10
        for value, given in zip(opt.get_weights(), (10, 1, 0), strict=True):
            assert (value == given).all()


_OTHERS = {
    "pseudocode": _pseudocode,
    "aggregated": _aggregated,
    "get_weights": _get_weights,
    "set_weights": _set_weights,
}


@pytest.mark.parametrize(
    ("page", "name"),
    [(page, name) for page, names in _RUNNABLE.items() for name in names if name not in _STEPS],
)
def test_another_block_does_as_documented(page, name):
    _OTHERS[name](_code(page)[name])


@pytest.mark.parametrize("page", _RUNNABLE)
def test_no_block_is_overlooked(page):
    assert len(_signatures(page)) == _SIGNATURES[page]
    # The extractor sees every place where the page uses the interface in code.
    call = r"\bopt\.minimize\(|\bapply_gradients\(\w*\("
    lines = [line for line in _text(page).splitlines() if re.search(call, line)]
    assert len(lines) == sum(len(re.findall(call, text)) for text in _code(page).values())
