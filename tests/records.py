"""Records of a run, as the tests compare them."""

import json


def read(path):
    """The records of a file, dictionaries."""
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def column(path, name):
    """One field of the records of a file."""
    return [record[name] for record in read(path)]


def skipped_steps(path):
    """The numbers of the skipped steps in a file."""
    return [record["step"] for record in read(path) if record["skipped"]]


def nonfinite(path):
    """The tensors of each record of a file, as plain tuples."""
    return [[tuple(each.values()) for each in record["nonfinite"]] for record in read(path)]
