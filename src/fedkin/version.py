"""The version of FedKin; everything else that names one reads it here."""

VERSION = "0.1.0"
