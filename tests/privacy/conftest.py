import pytest
from tests.privacy.ledgers import ACCOUNT

from fedpdmc.privacy.ledger import Ledger, create_ledger


@pytest.fixture
def ledger(tmp_path):
    found = Ledger.open(create_ledger(tmp_path / "ledger.db"))
    found.account(ACCOUNT)
    yield found
    found.close()
