"""Records of a run, as the tests ask for them."""

import types

from lossscale.monitoring import read_records


class TrainingHistory:
    def __init__(self, records):
        self.records = list(records)
        self.truncated = False

    @classmethod
    def read(cls, path):
        return cls(read_records(path))

    steps = property(lambda self: [record.step for record in self.records])
    scales = property(lambda self: [record.scale for record in self.records])
    losses = property(lambda self: [record.loss for record in self.records])
    skipped_steps = property(lambda self: [r.step for r in self.records if r.skipped])

    @property
    def skips(self):
        return types.SimpleNamespace(skips=self.records[-1].steps_skipped)

    @property
    def overflow_counts(self):
        names = [tensor.name for record in self.records for tensor in record.nonfinite]
        return {name: names.count(name) for name in names}
