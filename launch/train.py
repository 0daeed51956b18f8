"""`deepspeed launch/train.py --deepspeed_config x.json` trains as `python -m omnibal.train` does under a launcher."""

from omnibal.train import main

if __name__ == "__main__":
    main()
