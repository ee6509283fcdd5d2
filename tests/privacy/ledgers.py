"""A ledger with an account, and requests to it."""

from fedpdmc.privacy.ledger import Account, Ledger, LedgerRequest, Reply

ACCOUNT = Account("patients", 1.0, 1e-6, "replace", 20.0, 1.0)


def request(number, plan=b"p" * 32, study="s", run="r"):
    return LedgerRequest("patients", study, run, "round", number, plan)


def reply(cost=0.1):
    return lambda key: Reply(b"arrival " + key[:4], 2.0, cost)


def reopened(ledger):
    ledger.close()
    again = Ledger.open(ledger.path)
    again.account(ACCOUNT)
    return again
