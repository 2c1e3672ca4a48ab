"""A file of ours loads whatever the order of imports; isort puts lossscale before tensorflow."""

import forks

# All modules below the roots stay imported, so that another import runs the root module alone, in
# milliseconds, by the finders. TensorFlow's is left out: to other modules it is an import of Keras,
# so that each of its orders is one of the others.
PROGRAM = r"""
import itertools, pathlib, sys, tempfile, warnings

assert {"keras", "tensorflow"} <= sys.modules.keys()
import tf_keras

import lossscale

warnings.simplefilter("ignore")
folder = pathlib.Path(tempfile.mkdtemp())
NAMES = [f"{package}>LossScaleOptimizer" for package in ("lossscale", "lossscale.experimental")]


def makers():
    inner = library.optimizers.SGD
    yield "front", lambda: lossscale.LossScaleOptimizer(inner(0.5), initial_scale=8.0)
    yield "older", lambda: lossscale.experimental.LossScaleOptimizer(inner(0.5), 8)


def path(name, suffix):
    return str(folder / f"{root}-{name}{suffix}")


def is_right(optimizer, name):
    older = isinstance(optimizer, lossscale.experimental.LossScaleOptimizer)
    assert isinstance(optimizer, lossscale.LossScaleOptimizer), optimizer
    assert isinstance(optimizer, library.optimizers.Optimizer), optimizer
    assert older == (name == "older"), optimizer
    assert type(optimizer).__name__ == "LossScaleOptimizer"
    assert optimizer.initial_scale == 8.0


configs = {}
for root in ("keras", "tf_keras"):
    library = sys.modules[root]
    for name, make in makers():
        model = library.Sequential([library.Input((1,)), library.layers.Dense(1)])
        # Keras 3.15 cannot load its .h5 of a loss that is named by a string.
        model.compile(make(), library.losses.MeanSquaredError(), run_eagerly=True)
        for suffix in (".keras", ".h5"):
            model.save(path(name, suffix))
        configs[root, name] = library.optimizers.serialize(model.optimizer)


def forget():
    sys.meta_path[:] = [each for each in sys.meta_path if "lossscale" not in str(each)]
    for name in [*sys.modules]:
        if name.partition(".")[0] == "lossscale" or name in ("keras", "tf_keras"):
            root = sys.modules.pop(name)
            if name in ("keras", "tf_keras"):
                known = root.saving.get_custom_objects()
                for each in [*known]:
                    if "lossscale" in f"{each} {known[each]}":
                        del known[each]


tried = set()
orders = [*itertools.permutations(("lossscale", "keras", "tf_keras"))]
orders += [(f"lossscale.{name}",) for name in ("keras", "tf_keras", "experimental.keras")]
for order in orders:
    forget()
    for name in order:
        __import__(name)
    import lossscale

    if len(order) > 1:
        # None of a framework that is loaded, until it is asked for.
        wrappers = ("lossscale.keras", "lossscale.tf_keras")
        assert not [name for name in sys.modules if name.startswith(wrappers)], order
    before = frozenset(order[: order.index("lossscale")]) if len(order) > 1 else None
    for root in {"keras", "tf_keras"} & sys.modules.keys():
        library = sys.modules[root]
        # The finder that registers the names leaves its loader as it was.
        assert library.__spec__.loader.__class__.__name__ == "SourceFileLoader", root
        for name in NAMES:
            assert library.saving.get_registered_object(name) is not None, (order, root, name)
        for name, _ in makers():
            is_right(library.optimizers.deserialize(configs[root, name]), name)
    if before in tried or before is None:
        continue
    tried.add(before)
    for root in ("keras", "tf_keras"):
        library = sys.modules[root]
        for name, _ in makers():
            for suffix in (".keras", ".h5"):
                model = library.models.load_model(path(name, suffix))
                is_right(model.optimizer, name)
            if name == "front":
                described = model.optimizer.get_config()
                is_right(lossscale.LossScaleOptimizer.from_config(described), name)
print(len(orders), "orders")
"""


def test_a_file_loads_whatever_the_order_of_imports():
    done = forks.Program(PROGRAM).finished()
    assert (done.returncode, done.stdout) == (0, "9 orders\n"), done.stderr
