"""What a rank remembers, and what it does in a step."""
