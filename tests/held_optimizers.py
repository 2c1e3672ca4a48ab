"""Optimizers that hold others as an attribute, which Keras saves beside their variables."""


def holding(keras, name, make=None):
    """An optimizer of Keras 3 or tf_keras with such an attribute, by default one optimizer."""

    class Holding(keras.optimizers.SGD):
        def __init__(self):
            super().__init__(0.1, momentum=0.9)
            setattr(self, name, (make or (lambda: other(keras)))())

        def build(self, variables):
            super().build(variables)
            for each in optimizers_in(getattr(self, name)):
                each.build(variables)

    return Holding()


def other(keras):
    return keras.optimizers.SGD(0.1, momentum=0.5)


def optimizers_in(attribute):
    parts = list(attribute.values()) if isinstance(attribute, dict) else attribute
    return parts if isinstance(parts, list) else [parts]
