"""A file of ours loads once `lossscale.keras` or `lossscale.tf_keras` is imported, in any order."""

import forks

PROGRAM = r"""
import pathlib, sys, tempfile, warnings

import keras, tf_keras
import lossscale

assert not [name for name in sys.modules if name.startswith("lossscale.keras")]
for library in (keras, tf_keras):
    assert library.saving.get_registered_object("lossscale>LossScaleOptimizer") is None

import lossscale.keras, lossscale.tf_keras
import lossscale.experimental.keras, lossscale.experimental.tf_keras

warnings.simplefilter("ignore")
folder = pathlib.Path(tempfile.mkdtemp())
OLD = ["LossScaleOptimizer", "LossScaleOptimizerV1", "LossScaleOptimizerV3"]
OLD += [name.lower() for name in OLD[1:]]
for name in OLD:
    assert keras.saving.get_registered_object(name) is lossscale.keras.LossScaleOptimizer, name
assert keras.optimizers.LossScaleOptimizer.__module__.startswith("keras.")
for library, package in ((keras, lossscale.keras), (tf_keras, lossscale.tf_keras)):
    older = getattr(lossscale.experimental, library.__name__)
    for name, cls, value in (("front", package, 8.0), ("older", older, 8)):
        front = lossscale if name == "front" else lossscale.experimental
        inner = library.optimizers.SGD(0.5)
        keywords = {"initial_scale": value} if name == "front" else {"loss_scale": value}
        model = library.Sequential([library.Input((1,)), library.layers.Dense(1)])
        # Keras 3.15 cannot load its .h5 of a loss that is named by a string.
        loss = library.losses.MeanSquaredError()
        model.compile(front.LossScaleOptimizer(inner, **keywords), loss, run_eagerly=True)
        described = library.optimizers.serialize(model.optimizer)
        found = [library.optimizers.deserialize(described)]
        found.append(type(model.optimizer).from_config(model.optimizer.get_config()))
        for suffix in (".keras", ".h5"):
            path = str(folder / f"{library.__name__}-{name}{suffix}")
            model.save(path)
            found.append(library.models.load_model(path).optimizer)
        for optimizer in found:
            assert isinstance(optimizer, cls.LossScaleOptimizer), optimizer
            assert isinstance(optimizer, library.optimizers.Optimizer), optimizer
            assert optimizer.initial_scale == 8.0
print("loaded")
"""


def test_a_file_loads_after_the_package_of_its_keras_is_imported():
    done = forks.Program(PROGRAM).finished()
    assert (done.returncode, done.stdout) == (0, "loaded\n"), done.stderr
