// Row softmax in CUDA C++: one block a row. Each thread strides over the row, a tree in shared memory joins the
// threads. Three passes: the maximum, the sum, the result. blockDim.x is a power of two, at most 256.
extern "C" __global__ void softmax_rows(const float* x, float* y, int columns) {
    __shared__ float shared[256];
    const long long row = (long long)blockIdx.x * columns;

    float m = __int_as_float(0xff800000);  // -inf
    for (int j = threadIdx.x; j < columns; j += blockDim.x) m = fmaxf(m, x[row + j]);
    shared[threadIdx.x] = m;
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) shared[threadIdx.x] = fmaxf(shared[threadIdx.x], shared[threadIdx.x + half]);
        __syncthreads();
    }
    m = shared[0];
    __syncthreads();  // everyone has read it before it is written again

    float s = 0.0f;
    for (int j = threadIdx.x; j < columns; j += blockDim.x) s += expf(x[row + j] - m);
    shared[threadIdx.x] = s;
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
        __syncthreads();
    }
    s = shared[0];

    for (int j = threadIdx.x; j < columns; j += blockDim.x) y[row + j] = expf(x[row + j] - m) / s;
}
