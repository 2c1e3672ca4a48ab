"""Loops of PyTorch in the shapes of public programs, with the drop-in and with the wrapper.

Each takes a `Scaling` and batches, and returns the weights that it ends with.
"""

import torch


def new_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1))


def loss_of(model, batch):
    x, y = batch
    return torch.nn.functional.mse_loss(model(x)[:, 0], y)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.125, momentum=0.5)


def optimizers_in_the_backward_pass(scaling, batches):
    """One optimizer for each parameter, stepped by a hook as soon as its gradient is there."""
    model = new_model()
    optimizers = {p: momentum([p]) for p in model.parameters()}
    scaler = scaling.scaler()

    def hook(parameter):
        scaler.step(optimizers[parameter])
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    for batch in batches:
        scaler.scale(loss_of(model, batch)).backward()
        scaler.update()
    return list(model.parameters())


def a_pipeline_of_two_stages(scaling, batches):
    """Each stage has an optimizer; the second sends the gradient of what it was given back."""
    model = new_model()
    stages = torch.nn.Sequential(*model[:2]), torch.nn.Sequential(*model[2:])
    optimizer = scaling.wrapped([momentum(stage.parameters()) for stage in stages])
    for number in range(0, len(batches), 2):
        for x, y in batches[number : number + 2]:
            sent = stages[0](x)
            received = sent.detach().requires_grad_()
            loss = loss_of(stages[1], (received, y))
            scaling.scale(optimizer, loss).backward()
            sent.backward(received.grad)
        for each in optimizer if isinstance(optimizer, list) else [optimizer]:
            each.step()
            each.zero_grad()
    return list(model.parameters())


# With how many batches there are to a step.
WITH_THE_WRAPPER = {a_pipeline_of_two_stages: 2}
PROGRAMS = {optimizers_in_the_backward_pass: 1, **WITH_THE_WRAPPER}
