// Writes where nothing is, so that the context is lost.
extern "C" __global__ void illegal(int* out) { out[(1ll << 44) + threadIdx.x] = 1; }
