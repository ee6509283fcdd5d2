"""After sampling: how well the model fits and predicts, worked out at the sites, of which only summaries leave."""
