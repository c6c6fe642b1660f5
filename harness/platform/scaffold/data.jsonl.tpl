{"user_prompt": "Name the capital of France.", "ground_truth": "Paris"}
{"user_prompt": "Name the capital of Japan.", "ground_truth": "Tokyo"}
{"user_prompt": "Name the capital of Peru.", "ground_truth": "Lima"}
{"user_prompt": "Name the capital of Kenya.", "ground_truth": "Nairobi"}
