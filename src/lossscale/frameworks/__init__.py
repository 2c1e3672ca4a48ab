"""One package per framework; each imports its own framework and no other."""
