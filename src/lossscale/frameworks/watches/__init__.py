"""What a training step notes for a monitor: one module per framework, each with a `Watch`.

A watch is part of the step only while an optimizer has one. It keeps a few small tensors on the
device: the scale of the last step, which gradients were not finite on the last skipped step, and
the exponents of the gradients of the last sampled step. Nothing waits for the host until a monitor
reads them.
"""
