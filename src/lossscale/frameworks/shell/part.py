"""The base of the classes that a shell is put together from."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # Each part uses attributes that the others define.
    Part: Any
else:

    class Part:
        """One part of a shell, such as its documented verbs or its persistence."""
