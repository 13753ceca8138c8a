// What both ways of training, gathered and dense, do with the products of one active neuron and token.
#pragma once

#include "sparse/words.cuh"

// ReLU that passes NaN on.
__device__ __forceinline__ float relu(float value) { return value < 0.0f ? 0.0f : value; }

// The gradients of x . gate and x . up, and h, of one active value.
struct Active {
  float gate, up, inner;
};

// From the products x . gate (without a gate x . up), x . up and grad_out . down; l1: the gradient of |h|.
template <bool GATED, bool SQUARE>
__device__ __forceinline__ Active gradients_of(float product, float up, float grad_out, float l1) {
  const float first = relu(product), outer = activate<SQUARE>(first), inner = GATED ? outer * up : outer;
  const float sign = inner > 0.0f ? 1.0f : inner < 0.0f ? -1.0f : 0.0f;
  const float grad = grad_out + l1 * sign, slope = SQUARE ? 2.0f * first : 1.0f;
  return GATED ? Active{grad * up * slope, grad * outer, inner} : Active{0.0f, grad * slope, inner};
}
