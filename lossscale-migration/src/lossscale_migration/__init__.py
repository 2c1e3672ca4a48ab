"""Loads files and configurations of every release of TensorFlow into this library."""

from lossscale.packages import not_installed

try:
    from lossscale_migration.conversion import migrate_file
    from lossscale_migration.damaged_files import check_file
    from lossscale_migration.description import FileDescription, OptimizerDescription, describe_file
    from lossscale_migration.loading import load_model
    from lossscale_migration.restoring import Restored, restore_checkpoint
except ModuleNotFoundError as error:
    if error.name != "numpy":
        raise
    raise not_installed(["numpy"]) from None

__all__ = [
    "FileDescription",
    "OptimizerDescription",
    "Restored",
    "check_file",
    "describe_file",
    "load_model",
    "migrate_file",
    "restore_checkpoint",
]
