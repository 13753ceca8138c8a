// The smallest kernel that shows that a launch did what was asked: out = scale * x + y, and from each CTA how many
// elements it computed and where in its cluster it ran. For tests of the launch layer.
#include "ptx/cluster.cuh"
#include "ptx/platform.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) selfcheck(
    const float* x,  // (n,)
    const float* y,  // (n,)
    float* out,      // (n,)
    int* elements,   // (ctas,)
    int* place,      // (ctas,) 256 * size of the cluster + rank in it
    int n, int ctas, float scale) {
  int* counts = reinterpret_cast<int*>(dynamic_shared());  // (THREADS,)
  int mine = 0;
  for (int i = blockIdx.x * THREADS + threadIdx.x; i < n; i += ctas * THREADS) {
    out[i] = scale * x[i] + y[i];
    ++mine;
  }
  counts[threadIdx.x] = mine;
  __syncthreads();
  if (threadIdx.x == 0) {
    int sum = 0;
    for (int thread = 0; thread < THREADS; ++thread) sum += counts[thread];
    elements[blockIdx.x] = sum;
    place[blockIdx.x] = 256 * cluster_size() + cluster_rank();
  }
}
