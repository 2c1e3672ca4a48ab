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


def nanogpt(scaling, batches, folder):
    """Micro-batches, a learning rate by the step, clipping, a scaler."""
    model = new_model()
    optimizer, scaler = momentum(model.parameters()), scaling.scaler()
    for number in range(0, len(batches), 2):
        for group in optimizer.param_groups:
            group["lr"] = 0.125
        for batch in batches[number : number + 2]:
            loss = loss_of(model, batch) / 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    return list(model.parameters())


def timm(scaling, batches, folder):
    """A callable that does the whole step, and whose state goes through a file."""

    class NativeScaler:
        def __init__(self, scaler):
            self._scaler = scaler

        def __call__(self, loss, optimizer, parameters, need_update=True):
            self._scaler.scale(loss).backward(create_graph=False)
            if need_update:
                self._scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(parameters, 0.5)
                self._scaler.step(optimizer)
                self._scaler.update()

    for number in range(0, len(batches), 2):
        model = new_model()
        optimizer, scaler = momentum(model.parameters()), scaling.scaler()
        loss_scaler, path = NativeScaler(scaler), folder / "last.pt"
        if number:
            saved = torch.load(path, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            scaler.load_state_dict(saved["scaler"])
        for index, batch in enumerate(batches[number : number + 2]):
            loss_scaler(loss_of(model, batch) / 2, optimizer, model.parameters(), bool(index))
        parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
        torch.save({name: part.state_dict() for name, part in parts.items()}, path)
    return list(model.parameters())


def optimizers_in_the_backward_pass(scaling, batches, folder):
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


def a_pipeline_of_two_stages(scaling, batches, folder):
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


def an_average_of_the_weights(scaling, batches, folder):
    """`AveragedModel` beside the model, updated on steps that were applied."""
    model = new_model()
    optimizer, scaler = momentum(model.parameters()), scaling.scaler()
    average = torch.optim.swa_utils.AveragedModel(model)
    for number in range(0, len(batches), 2):
        before = scaler.get_scale()
        for batch in batches[number : number + 2]:
            scaler.scale(loss_of(model, batch)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scaler.get_scale() >= before:
            average.update_parameters(model)
    return [*model.parameters(), *average.module.parameters()]


# With how many batches there are to a step.
WITH_THE_WRAPPER = {a_pipeline_of_two_stages: 2}
PROGRAMS = {
    nanogpt: 2,
    timm: 2,
    optimizers_in_the_backward_pass: 1,
    an_average_of_the_weights: 2,
    **WITH_THE_WRAPPER,
}
