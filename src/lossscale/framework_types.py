"""Names for what frameworks without types take and return: what goes in, and what comes out.

Keras, TensorFlow and tf_keras have no annotations, so that most of these are Any to a type checker.
PyTorch, JAX and Optax have types of their own, which the code for them uses instead. None is
included only where the line says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

Array: TypeAlias = Any
"""An array of any framework or of NumPy, or a number."""
Tensor: TypeAlias = Any
"""A tensor of TensorFlow, or of the backend of Keras."""
Gradient: TypeAlias = Any
"""A tensor, dense or sparse, or `tf.IndexedSlices`; None for a variable without a gradient."""
Variable: TypeAlias = Any
"""A variable of Keras, of tf_keras or of TensorFlow; in `common`, a parameter of PyTorch too."""
Scalar: TypeAlias = Any
"""A number or a truth value: a 0-d array or tensor, a float, an int or a bool."""
Loss: TypeAlias = Any
"""A tensor, a number, or a callable that returns one."""
KerasOptimizer: TypeAlias = Any
"""An optimizer of Keras or tf_keras."""
Layer: TypeAlias = Any
"""A layer of Keras or tf_keras."""
Model: TypeAlias = Any
"""A model of Keras or tf_keras."""
DType: TypeAlias = Any
"""A dtype of NumPy or of a framework, or its name; None for the default."""
Initializer: TypeAlias = Any
"""An initializer of Keras or its name, or a callable of shape and dtype, or a first value."""
LearningRate: TypeAlias = Any
"""A number, a variable or a schedule."""
Operation: TypeAlias = Any
"""An operation or a tensor of a TensorFlow graph; None in eager mode."""
Store: TypeAlias = Any
"""A place in a model file, or a dictionary: arrays by name."""
Node: TypeAlias = Any
"""An object in a checkpoint of TensorFlow, or None."""
Tape: TypeAlias = Any
"""A `tf.GradientTape`, or None."""
VarList: TypeAlias = Any
"""One variable, a list of them, or a callable that returns either; None for those of a tape."""
Class: TypeAlias = Any
"""A class of a framework, or one of ours that inherits from it."""
Structure: TypeAlias = Any
"""Tensors, arrays or variables in lists, tuples and dictionaries, or a single one."""
Library: TypeAlias = Any
"""A module whose names are looked up at run time."""
RuleState: TypeAlias = Any
"""The state of a rule: a named tuple such as a `ScaleState`, whose first field is `scale`."""
Gradients: TypeAlias = Sequence[Gradient]
"""A gradient for each variable, in their order."""
Variables: TypeAlias = Sequence[Variable]
"""Variables in their order."""
GradsAndVars: TypeAlias = list[tuple[Gradient, Variable]]
"""(gradient, variable) pairs."""
Config: TypeAlias = dict[str, Any]
"""The configuration of an object of Keras, as JSON holds it."""
Function: TypeAlias = Callable[..., Any]
"""A function that is passed on: the user's, a framework's or one of ours."""
