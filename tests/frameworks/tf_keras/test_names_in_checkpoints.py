"""An inner optimizer may have children of the names that loss scaling has in checkpoints."""

import functools
import itertools

import pytest
import tensorflow as tf
import tf_keras

from frameworks.tf_keras.support import status, wrapped

NEW, LEGACY = tf_keras.optimizers, tf_keras.optimizers.legacy
NAMES = ("loss_scale", "base_optimizer", "lossscale")


def attribute(name, *, late=False):
    """A new optimizer with a variable as an attribute of this name, which TensorFlow tracks."""

    class WithAttribute(NEW.SGD):
        def __init__(self):
            super().__init__(0.1, momentum=0.9)
            if not late:
                setattr(self, name, tf.Variable(0.0))

        def build(self, var_list):
            super().build(var_list)
            if not hasattr(self, name):
                setattr(self, name, tf.Variable(0.0))

        @property
        def own(self):
            return getattr(self, name)

    return WithAttribute()


def tracked(name):
    """A legacy optimizer that tracks a variable under this name, as averaging ones do."""

    class Tracking(LEGACY.SGD):
        def __init__(self):
            super().__init__(0.1, momentum=0.9)
            self.own = tf.Variable(0.0)
            self._track_trackable(self.own, name)

    return Tracking()


KINDS = {
    "new": attribute,
    "new, of build": functools.partial(attribute, late=True),
    "legacy": tracked,
}


def states(optimizer, trained):
    """The state of an optimizer and of its own child; that of loss scaling, if it has any."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    slot = (
        inner.momentums[0] if hasattr(inner, "momentums") else inner.get_slot(trained, "momentum")
    )
    own = float(inner.own), slot.numpy().tolist(), int(inner.iterations)
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
    inner.own.assign(7.0)
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


@pytest.mark.parametrize("make", [attribute, tracked])
def test_own_class_reads_the_scale_beside_a_child_named_base_optimizer(tmp_path, make):
    written = wrapped(make("base_optimizer"), initial_scale=64.0)
    path = tf.train.Checkpoint(optimizer=written).save(tmp_path / "a")
    read = tf_keras.mixed_precision.LossScaleOptimizer(make("free"))
    tf.train.Checkpoint(optimizer=read).restore(path).expect_partial()
    assert float(read.loss_scale) == 64.0


@pytest.mark.parametrize("make", [attribute, tracked])
def test_the_one_name_that_is_taken_is_refused(tmp_path, make):
    inner = make("free")
    optimizer = wrapped(inner)
    inner._track_trackable(tf.Variable(0.0), "lossscale.loss_scale")
    for use in (
        lambda: tf.train.Checkpoint(optimizer=optimizer).save(tmp_path / "a"),
        lambda: wrapped(make("lossscale.loss_scale")),
    ):
        with pytest.raises(ValueError, match=r"tracks a .* as 'lossscale\.loss_scale'"):
            use()
