"""Records of a run, as the tests compare them."""

from lossscale.monitoring import read_records


def column(path, name):
    """One field of the records of a file."""
    return [getattr(record, name) for record in read_records(path)]


def skipped_steps(path):
    """The numbers of the skipped steps in a file."""
    return [record.step for record in read_records(path) if record.skipped]


def nonfinite(path):
    """The tensors of each record of a file, as plain tuples."""
    return [[tuple(tensor) for tensor in record.nonfinite] for record in read_records(path)]
