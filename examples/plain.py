"""A plain PyTorch loop with three lines changed. `python plain.py`, or `weft train plain.py -n 4`."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weft

run = weft.init()  # 1
x = torch.randn(5120, 20)
y = (x @ torch.randn(20, 1)).sin()
loader = DataLoader(TensorDataset(x[:4096], y[:4096]), batch_size=32, shuffle=True)
held_out = DataLoader(TensorDataset(x[4096:], y[4096:]), batch_size=64)
model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer = run.distribute(model, optimizer)  # 2

for epoch in run.epochs(3):  # a resumed run skips completed epochs
    for inputs, targets in run.shard(loader):  # 3
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)
    with torch.no_grad():
        losses = [nn.functional.mse_loss(model(a), b, reduction="sum") for a, b in run.evaluate(held_out)]
    total = run.sum(loss=sum(losses))["loss"]  # over all workers
    if run.is_main:
        print(f"epoch {epoch}: held-out loss {total / 1024:.4f}")
