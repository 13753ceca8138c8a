// The down phase: the feed-forward's inner values, projected and added to the residual; as out, with other inputs.
#pragma once

#include "phases/out/kernel.cuh"
