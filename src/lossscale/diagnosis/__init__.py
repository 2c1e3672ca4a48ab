"""`diagnose` measures whether a model needs loss scaling; `explain` names what is not finite."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from lossscale.checks import checked_scale
from lossscale.errors import ArgumentTypeError
from lossscale.framework_types import Model, Structure, Tensor, Variable

if TYPE_CHECKING:
    from lossscale.diagnosis.report import Report
    from lossscale.explain.text import Explanation

__all__ = ["diagnose", "explain"]


def diagnose(
    model: Model,
    x: Structure | Iterable[Structure],
    y: Structure = None,
    *,
    sample_weight: Structure = None,
    loss_fn: Callable[[Model, Structure], Tensor] | None = None,
    parameters: Iterable[Variable] | None = None,
    max_batches: int = 2,
    batch_size: int = 32,
) -> Report:
    """Measures how accurate a Keras model's gradients are in float16, and which rule they need.

    On each batch, the gradients are computed several times: in float32, and in float16 at several
    loss scales. A model that does not compute in float16 is measured as under `mixed_float16`;
    layers that were created with their own dtype keep it. No step is taken. The model, its
    optimizer, its metrics, its statistics and its random seeds stay unchanged, also if it raises.

    Gradients change as a network learns. Measure at the start of training, and again later.

    Args:
        model: A built model of Keras 3, compiled unless `loss_fn` is given.
        x: Arrays of shape (rows, ...), in a list or dictionary if the model has several inputs; or
            an iterable of batches (x,), (x, y) or (x, y, sample_weight), such as a dataset or a
            list of tuples.
        y: Targets, arrays with the same number of rows; None with an iterable of batches.
        sample_weight: Weights of the rows in the loss, arrays of shape (rows,), or None. For class
            weights, pass the weight of each row's class.
        loss_fn: Called with the model and a batch (x, y, sample_weight), tensors or None. Returns
            the unscaled loss, a scalar tensor. By default, the loss that the model was compiled
            with. A model with its own `train_step` needs one.
        parameters: The variables that the optimizer of this loss trains, if not all.
        max_batches: The largest number of batches to measure on. From arrays, rows are picked at
            random, always the same ones.
        batch_size: Rows in each batch from arrays. It matters: a loss is averaged over the batch,
            so a larger batch has smaller gradients. Use the batch size of training.

    Returns:
        The report. Print it, or read `verdict` and `rule`.

    Raises:
        ArgumentTypeError: If `model` is not a model of Keras 3, or `loss_fn` does not return a
            loss.
        ArgumentError: If its loss is not known, it has no variables, or the data or another
            argument cannot be used.

    Examples:
        >>> diagnose("model", [1.0])
        Traceback (most recent call last):
        ...
        lossscale.errors.ArgumentTypeError: The first argument must be a model of Keras 3.
        Received: 'model' of type str. ...
    """
    _check_is_keras(model, "diagnose")
    from lossscale.diagnosis.keras import KerasGradientFunction, batches_of
    from lossscale.diagnosis.measurement import measure
    from lossscale.diagnosis.report import Report

    run = KerasGradientFunction(model, loss_fn, parameters)
    batches = batches_of(x, y, sample_weight, batch_size)
    return Report(model.name, run.setting, measure(run, batches, max_batches))


def explain(
    model: Model,
    x: Structure,
    y: Structure = None,
    *,
    sample_weight: Structure = None,
    loss_fn: Callable[[Model, Structure], Tensor] | None = None,
    parameters: Iterable[Variable] | None = None,
    scale: float = 2.0**15,
) -> Explanation:
    """Explains why a step on a batch would be skipped: the first operation that is not finite.

    A skipped step changed no weight, so the model computes the same pass again. This computes the
    loss and its gradients as `diagnose` does, operation by operation, which takes many times as
    long as a step. A compiled step may compute some of them together, without rounding to float16
    in between. The model and the arrays stay unchanged.

    Args:
        model: A built model of Keras 3, compiled unless `loss_fn` is given.
        x: The inputs of one batch: arrays of shape (rows, ...), in a list or dictionary if the
            model has several.
        y: The targets of the batch, or None.
        sample_weight: The weights of the rows, arrays of shape (rows,), or None.
        loss_fn: As for `diagnose`. It must be repeatable.
        parameters: As for `diagnose`.
        scale: The loss scale of the step.

    Returns:
        The explanation. Its cause is "unknown" if the pass is finite, also if an overflow in it is
        made finite by a later operation, which the text names.

    Raises:
        ArgumentTypeError: If `model` is not a model of Keras 3, or `loss_fn` does not return a
            loss.
        ArgumentError: If its loss is not known, it has no variables, none of `parameters` is one of
            them, the numbers of rows differ, or `scale` is not a number in [2**-126, 2**126].

    Examples:
        >>> explain("model", [1.0])
        Traceback (most recent call last):
        ...
        lossscale.errors.ArgumentTypeError: The first argument must be a model of Keras 3.
        Received: 'model' of type str. ...
    """
    _check_is_keras(model, "explain")
    from lossscale.diagnosis.keras import KerasGradientFunction, number_of_rows, one_batch

    run = KerasGradientFunction(model, loss_fn, parameters)
    batch = one_batch(x, y, sample_weight)
    if loss_fn is None:
        number_of_rows(batch)
    return run.explain(batch, checked_scale("scale", scale))


def _check_is_keras(model: object, name: str) -> None:
    keras = sys.modules.get("keras")
    if keras is not None and keras.__version__ >= "3" and isinstance(model, keras.Model):
        return
    raise ArgumentTypeError(
        f"The first argument must be a model of Keras 3. Received: {model!r} of type "
        f"{type(model).__name__}. PyTorch has lossscale.torch.{name}(model, loss_fn, ...), JAX "
        f"lossscale.optax.{name}(loss_fn, params, ...). Build the layers of a tf_keras model with "
        "Keras 3, and write new_model.set_weights(model.get_weights())."
    )
