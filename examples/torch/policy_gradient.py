"""Trains a policy by policy gradients in float16, while a float16 copy of it acts.

The copy and the policy both compute in float16, so they give an action nearly the same probability,
which policy gradients assume. The copy is updated after applied steps.
"""

import copy

import torch

import lossscale

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
rewards = torch.tensor([0.0, 0.2, 1.0, 0.1], device=device)
policy = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
policy.to(device)
actor = copy.deepcopy(policy).half()
inner = torch.optim.AdamW(policy.parameters(), lr=0.02)
optimizer = lossscale.torch.LossScaleOptimizer(inner, clip_norm=1.0)

for _ in range(60):
    states = torch.randn(64, 4, device=device)
    with torch.no_grad():
        actions = torch.distributions.Categorical(logits=actor(states.half()).float()).sample()
    advantage = rewards[actions] - rewards[actions].mean()
    with torch.autocast(device, torch.float16):
        logits = policy(states)
    log_probability = torch.distributions.Categorical(logits=logits.float()).log_prob(actions)
    optimizer.zero_grad()
    optimizer.backward(-(advantage * log_probability).mean())
    optimizer.step()
    if not optimizer.last_step_skipped:
        with torch.no_grad():
            for mine, trained in zip(actor.parameters(), policy.parameters()):
                mine.copy_(trained)

best = actor(torch.randn(256, 4, device=device).half()).argmax(1)
share = (best == 2).float().mean()
print(f"chooses the best action: {share:.0%}, steps skipped: {optimizer.steps_skipped}")
