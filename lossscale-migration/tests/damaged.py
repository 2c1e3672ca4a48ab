"""Damaged files, each made anew from its number; and a program that reads many of them.

The program prints a line for each: a crash of the HDF5 library ends it, and the caller goes on
behind the file that it was reading.
"""

import copy
import io
import json
import random
import signal
import sys
import zipfile


def flipped(content, seed):
    """A file with some bytes changed, cut, moved or written twice."""
    draw = random.Random(seed)
    damaged = bytearray(content)
    for _ in range(draw.randint(1, 8)):
        at = draw.randrange(len(damaged))
        kind = draw.randrange(12)
        if kind == 0:
            del damaged[at : at + draw.randint(1, 64)]
        elif kind == 1:
            start = draw.randrange(len(damaged))
            damaged[at:at] = damaged[start : start + draw.randint(1, 64)]
        elif kind == 2 and seed % 4 == 0:
            del damaged[max(at, 1) :]
        elif kind < 5:
            damaged[at] = draw.choice((0, 1, 127, 128, 255))
        else:
            damaged[at] = draw.randrange(256)
    return bytes(damaged)


# What stands in the place of a value: of another kind, out of range, or missing.
_ODD = (
    *(None, True, -1, 0, 1e308, 10**400),
    *("", "nan", "\ud800"),
    *([], [[]], {}, {"class_name": "Dense"}),
)


def changed_json(text, seed):
    """The same JSON with some values replaced, removed or renamed."""
    draw = random.Random(seed)
    value = json.loads(text)
    for _ in range(draw.randint(1, 3)):
        inside = value
        while True:
            keys = list(inside) if isinstance(inside, dict) else range(len(inside))
            if not keys:
                break
            key = draw.choice(list(keys))
            if isinstance(inside[key], (dict, list)) and inside[key] and draw.random() < 0.8:
                inside = inside[key]
                continue
            kind = draw.randrange(6)
            if kind == 0:
                del inside[key]
            elif kind == 1 and isinstance(inside, dict):
                inside[f"{key}_"] = inside.pop(key)
            else:
                inside[key] = copy.deepcopy(draw.choice(_ODD))
            break
    return json.dumps(value)


def changed_member(path, name, change):
    """The bytes of a zip file with one member changed, and all checksums right."""
    content = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(content, "w") as new:
        for member in old.namelist():
            kept = old.read(member)
            new.writestr(member, change(kept) if member == name else kept)
    return content.getvalue()


def _read_them(source, folder, first, last):
    from lossscale.errors import OldFileError
    from lossscale_migration import describe_file

    with open(source, "rb") as file:
        content = file.read()
    path = f"{folder}/damaged.h5"
    for seed in range(first, last):
        with open(path, "wb") as file:
            file.write(flipped(content, seed))
        print(seed, end=" ", flush=True)
        # It works while the library does not return.
        signal.setitimer(signal.ITIMER_PROF, 0.5)
        try:
            describe_file(path)
            print("read", flush=True)
        except OldFileError:
            print("refused", flush=True)
        except Exception as error:
            print(f"{type(error).__name__}: {error}".splitlines()[0], flush=True)


if __name__ == "__main__":
    _read_them(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
