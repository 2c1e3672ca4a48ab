"""An inner optimizer may have children of the names that loss scaling has in checkpoints."""

import itertools

import pytest
import tensorflow as tf
import tf_keras

from frameworks.tf_keras.support import status, wrapped

NEW, LEGACY = tf_keras.optimizers, tf_keras.optimizers.legacy
NAMES = ("loss_scale", "base_optimizer", "lossscale")


def attribute(name, make, *, late=False):
    """A new optimizer with an attribute of this name, which TensorFlow tracks."""

    class WithAttribute(NEW.SGD):
        def __init__(self):
            super().__init__(0.1, momentum=0.9)
            if not late:
                setattr(self, name, make())

        def build(self, var_list):
            super().build(var_list)
            if not hasattr(self, name):
                setattr(self, name, make())

        @property
        def own(self):
            return getattr(self, name)

    return WithAttribute()


def tracked(name, make):
    """A legacy optimizer that tracks something under this name, as averaging ones do."""

    class Tracking(LEGACY.SGD):
        def __init__(self):
            super().__init__(0.1, momentum=0.9)
            self.own = make()
            self._track_trackable(self.own, name)

    return Tracking()


def hyperparameter(name, make):
    """A legacy optimizer with a hyperparameter, a variable that is made late."""

    class WithHyperparameter(LEGACY.SGD):
        def __init__(self):
            super().__init__(0.1, momentum=0.9)
            self._set_hyper(name, 0.0)

        @property
        def own(self):
            return self._hyper[name]

    return WithHyperparameter()


def variable():
    return tf.Variable(0.0)


KINDS = {
    "new, a variable": lambda name: attribute(name, variable),
    "new, a variable of build": lambda name: attribute(name, variable, late=True),
    "new, an optimizer": lambda name: attribute(name, lambda: NEW.SGD(0.1)),
    "legacy, a variable": lambda name: tracked(name, variable),
    "legacy, an optimizer": lambda name: tracked(name, lambda: LEGACY.SGD(0.1)),
    "legacy, a hyperparameter": lambda name: hyperparameter(name, variable),
}


def counter(inner):
    return getattr(inner.own, "iterations", inner.own)


def states(optimizer, trained):
    """The state of an optimizer and of its own child; that of loss scaling, if it has any."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    slot = (
        inner.momentums[0] if hasattr(inner, "momentums") else inner.get_slot(trained, "momentum")
    )
    own = float(counter(inner)), slot.numpy().tolist(), int(inner.iterations)
    return own, status(optimizer) if inner is not optimizer else None


def stepped(optimizer, trained):
    optimizer.minimize(lambda: trained**2, [trained])


WRITES, READS = ("wrapped", "plain", "the inner one of a wrapper"), ("wrapped", "plain")
WAYS = tuple(itertools.product(WRITES, READS, (False, True)))


# Each kind goes each way, by one of the names; each name goes each way too.
@pytest.mark.parametrize(
    ("kind", "name", "writes", "reads", "built"),
    [
        (kind, NAMES[(i + j) % len(NAMES)], *way)
        for i, kind in enumerate(KINDS)
        for j, way in enumerate(WAYS)
    ],
)
def test_a_child_of_the_inner_optimizer_is_saved_beside_the_loss_scale(
    tmp_path, kind, name, writes, reads, built
):
    if kind.endswith("build") and writes != "wrapped" and reads == "wrapped" and not built:
        pytest.skip("the name belongs to the loss scale as long as nothing else has it")
    first, second = tf.Variable(1.0), tf.Variable(1.0)
    inner = KINDS[kind](name)
    written = inner if writes == "plain" else wrapped(inner)
    for _ in range(3):
        stepped(written, first)
    counter(inner).assign(7.0 if counter(inner).dtype.is_floating else 7)
    saved = written if writes == "wrapped" else inner
    path = tf.train.Checkpoint(optimizer=saved, v=first).save(tmp_path / "a")

    inner = KINDS[kind](name)
    read = inner if reads == "plain" else wrapped(inner)
    if built:
        stepped(read, second)
    done = tf.train.Checkpoint(optimizer=read, v=second).restore(path)
    if writes == "wrapped" or reads == "plain":
        done.assert_existing_objects_matched()
    else:
        done.expect_partial()
    if not built:
        if isinstance(inner, NEW.Optimizer):
            inner.build([second])
        else:
            inner._create_all_weights([second])
    (own, scale), (expected, expected_scale) = states(read, second), states(saved, first)
    assert own == expected
    assert own[0] == 7
    if None not in (scale, expected_scale):
        assert scale == expected_scale


MAKERS = {"new": lambda name: attribute(name, variable), "legacy": lambda n: tracked(n, variable)}


@pytest.mark.parametrize("family", MAKERS)
def test_own_class_reads_the_scale_beside_a_child_named_base_optimizer(tmp_path, family):
    written = wrapped(MAKERS[family]("base_optimizer"), initial_scale=64.0)
    path = tf.train.Checkpoint(optimizer=written).save(tmp_path / "a")
    read = tf_keras.mixed_precision.LossScaleOptimizer(MAKERS[family]("free"))
    tf.train.Checkpoint(optimizer=read).restore(path).expect_partial()
    assert float(read.loss_scale) == 64.0


@pytest.mark.parametrize("family", MAKERS)
def test_the_one_name_that_is_taken_is_refused(tmp_path, family):
    inner = MAKERS[family]("free")
    optimizer = wrapped(inner)
    inner._track_trackable(variable(), "lossscale.loss_scale")
    for use in (
        lambda: tf.train.Checkpoint(optimizer=optimizer).save(tmp_path / "a"),
        lambda: wrapped(MAKERS[family]("lossscale.loss_scale")),
    ):
        with pytest.raises(ValueError, match=r"tracks a .* as 'lossscale\.loss_scale'"):
            use()
