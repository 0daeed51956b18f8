#!/usr/bin/env bash
# What the deepspeed launcher starts in place of Python where ranks share one CUDA device: it gives each a device of its own.
export LOCAL_RANK=0 CUDA_VISIBLE_DEVICES=0 NCCL_HOSTID=host$RANK
exec "$@"
