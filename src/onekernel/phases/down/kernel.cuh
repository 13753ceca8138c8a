// The down phase: the feed-forward's inner values, projected and added to the residual; as out, with other inputs.
#pragma once

#include "phases/out/kernel.cuh"

__device__ __forceinline__ void down_rows(const Machine& m, const Task& task, const Rows& rows) {
  residual_rows(m, task, rows);
}
