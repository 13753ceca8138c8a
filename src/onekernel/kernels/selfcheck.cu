// The smallest kernel that shows a launch works: out = scale * x + y over a grid-stride loop, and each CTA's count of
// elements. Used by the launch tests and by nothing else.

extern "C" __global__ void __launch_bounds__(THREADS) selfcheck(
    const float* x,      // (n,)
    const float* y,      // (n,)
    float* out,          // (n,)
    int* elements,       // (ctas,) how many elements each CTA computed
    int n, int ctas, float scale) {
  extern __shared__ int counts[];  // (THREADS,)
  int mine = 0;
  for (int i = blockIdx.x * THREADS + threadIdx.x; i < n; i += ctas * THREADS) {
    out[i] = scale * x[i] + y[i];
    ++mine;
  }
  counts[threadIdx.x] = mine;
  __syncthreads();
  if (threadIdx.x == 0) {
    int sum = 0;
    for (int t = 0; t < THREADS; ++t) sum += counts[t];
    elements[blockIdx.x] = sum;
  }
}
