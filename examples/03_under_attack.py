"""Under attack: three of ten clients send updates that point backwards. Which method bears it, and with which rule?"""

import fedkin as fk

results, rows = fk.compare(
    ["fedavg", "fedcap"],
    attack=["none", "ipm"],
    rule=["mean", "multi-krum:malicious=0.3"],  # FedCAP averages by no rule, and runs once
    data="digits",
    clients=10,
    malicious=0.3,
    rounds=6,
    epochs=2,
    lr=0.05,
)
for row in rows:
    print(f"{row['method']:8} attack {row['attack']:5} rule {row['rule']:25} {row['macro']['mean']:5.1f} %")

for result in results:
    if result.removed:
        print(f"{result.method} removed clients {sorted(result.removed)}; malicious were {result.malicious}.")
