import numpy as np

from fedpdmc.datasets import indomethacin


def test_hospitals_have_the_published_sizes_and_outcomes():
    trial = indomethacin()
    assert [len(h.y) for h in trial.hospitals] == [413, 164, 22, 3]
    assert [h.y.sum() for h in trial.hospitals] == [41, 36, 2, 0]
    for h in trial.hospitals:
        assert h.X.shape == (len(h.y), len(trial.names))
        assert h.X.dtype == h.y.dtype == np.float64


def test_arms_match_the_paper():
    # Elmunzer et al. 2012: pancreatitis in 27 of 295 patients on indomethacin and 52 of 307 on placebo.
    trial = indomethacin()
    X = np.concatenate([h.X for h in trial.hospitals])
    y = np.concatenate([h.y for h in trial.hospitals])
    treated = X[:, trial.names.index("indomethacin")] == 1
    assert (treated.sum(), y[treated].sum()) == (295, 27)
    assert ((~treated).sum(), y[~treated].sum()) == (307, 52)


def test_columns_use_their_documented_units():
    trial = indomethacin()
    X = np.concatenate([h.X for h in trial.hospitals])
    column = dict(zip(trial.names, X.T, strict=True))
    assert np.all(column["intercept"] == 1)
    assert (column["risk"].min(), column["risk"].max()) == (1.0 - 2.5, 5.5 - 2.5)
    assert (column["age"].min(), column["age"].max()) == (1.9 - 4.5, 9.0 - 4.5)
    assert column["male"].sum() == 126
