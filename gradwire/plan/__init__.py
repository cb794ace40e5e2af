"""What will a step cost, and does compressing pay? Predictions, and a choice with its reason."""
