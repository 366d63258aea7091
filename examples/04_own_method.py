"""A method of your own: clients share a model, and each mixes it with its own, the more the better it fits its data."""

from dataclasses import dataclass

import torch

import fedkin as fk


@dataclass(frozen=True)
class TrustOptions:
    sharpness: float = fk.option(2.0, "how fast trust falls with the loss", low=0)


@fk.METHODS.register("trust")
class Trust(fk.Method):
    Options = TrustOptions
    about = "the shared model and the client's own, mixed by how well each fits the client's data"
    private = "the client's own model"
    keeps = {"own": fk.Keep("row")}  # stays with the client, as client["own"]

    def round(self, fed, cohort):
        """The server: ask the cohort, average what comes back."""
        replies = fed.ask(cohort, self.train, model=self.model)
        self.model = replies.mean("model", otherwise=self.model)

    def train(self, client, model):
        """Where the data are: `client` is many clients at once, one row each."""
        trained, client["own"] = client.fit_together(
            [fk.Model(client.rows(model=model)), fk.Model(self.personal(client, model))]
        )
        return {"model": client.model(trained)}

    def personal(self, client, model):
        """The model that each client would use now."""
        shared = client.rows(model=model)
        better = client.loss(client["own"]) - client.loss(shared)
        trust = torch.sigmoid(self.options.sharpness * better).unsqueeze(1)
        return trust * shared + (1 - trust) * client["own"]


_, rows = fk.compare(["fedavg", "local", Trust], data="digits", clients=10, rounds=4, epochs=2, lr=0.1, seeds=2)
for row in rows:
    print(f"{row['method']:8} {row['macro']['mean']:5.1f} % on average over clients and seeds")
