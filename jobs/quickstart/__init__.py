"""The quickstart's target: how its prompts, text, tokenizer, weights and conversations are made. Nothing here imports ray."""
