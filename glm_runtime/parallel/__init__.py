"""How a replica of the model is spread over ranks: who has what, who meets whom, and what they exchange."""
