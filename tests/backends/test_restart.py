"""A process that dies during `fit` and starts again with `BackupAndRestore`."""

import json

from fresh import Program

PROGRAM = """
import json, os, sys
import keras, numpy as np
from backends.support import arrays, data, model_with, status, wrapped

folder, dies_in_epoch = sys.argv[1], int(sys.argv[2])
optimizer = wrapped(keras.optimizers.Adam(0.01))
model = model_with(optimizer)
x, y = data(40)
x[24:32] = np.nan


class Dies(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == dies_in_epoch:
            os._exit(7)


callbacks = [keras.callbacks.BackupAndRestore(folder), Dies()]
model.fit(x, y, batch_size=8, epochs=4, shuffle=False, verbose=0, callbacks=callbacks)
weights = [value.tolist() for value in arrays(model.trainable_variables)]
print(json.dumps([status(optimizer), weights]))
"""


def train(folder, dies_in_epoch):
    done = Program(PROGRAM, folder, dies_in_epoch).finished()
    return done.returncode, done.stdout.strip().splitlines()[-1:], done.stderr


def test_the_scale_goes_on_from_where_it_was(tmp_path):
    never = 99
    code, whole, errors = train(tmp_path / "whole", never)
    assert code == 0, errors[-2000:]
    code, printed, _ = train(tmp_path / "killed", 2)
    assert (code, printed) == (7, [])
    code, resumed, errors = train(tmp_path / "killed", never)
    assert code == 0, errors[-2000:]
    assert resumed == whole
    assert json.loads(whole[0])[0]["skipped"] == 4
