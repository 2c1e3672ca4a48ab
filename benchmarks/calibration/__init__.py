"""Is the verdict of a diagnosis right? Trainings with and without loss scaling, beside it."""
