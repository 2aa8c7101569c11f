"""A plain PyTorch loop with three lines changed. `python plain.py`, or `weft train plain.py -n 4`."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weft

run = weft.init()  # 1
x = torch.randn(4096, 20)
y = (x @ torch.randn(20, 1)).sin()
loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer = run.distribute(model, optimizer)  # 2
for inputs, targets in run.shard(loader):  # 3
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    run.log(loss=loss)
if run.is_main:
    print(f"{run.workers} workers, {run.step} steps, loss {loss.item():.3f}")
