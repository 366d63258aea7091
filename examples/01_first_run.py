"""A first run: twenty clients with two kinds of handwritten digits each, and a model of its own for every client."""

import fedkin as fk

settings = {"data": "digits", "clients": 20, "partition": fk.pathological(2), "rounds": 5, "lr": 0.05}

shared = fk.run("fedavg", **settings)  # one model for all
personal = fk.run("ditto", **settings, options={"lam": 0.5})  # a personal model, drawn to the shared one

for result in (shared, personal):
    accuracy = result.accuracy
    print(f"{result.method}: {accuracy.macro:.1f} % on average, {accuracy.worst_decile:.1f} % for the worst tenth")
print(f"Ditto moved {sum(personal.bytes.values()) / 1e6:.1f} MB.")

model = personal.personal(client=3)  # an ordinary nn.Module
print(f"Client 3 has a network of {sum(p.numel() for p in model.parameters())} weights.")
