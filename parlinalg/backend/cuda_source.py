"""The text of the CUDA kernels: T is the dtype of blocks, W the one they are computed in.

A block of threads takes a row and keeps its sums in registers; no kernel uses atomics, so that sums are the same on
every run.  The names' prefix keeps them apart from CUDA's own, such as `norm`.
"""

SOURCE = r"""
typedef long long Int;

__device__ inline W block_sum(W v) {
    // the sum over all threads of the block, on each of them; blockDim.x is a multiple of 32, at most 1024
    __shared__ W warps[32];
    for (int step = 16; step > 0; step >>= 1) v += __shfl_xor_sync(0xffffffffu, v, step);
    __syncthreads();  // a sum before this one has been read
    if ((threadIdx.x & 31) == 0) warps[threadIdx.x >> 5] = v;
    __syncthreads();
    W total = 0;
    for (int i = 0; i < (int)(blockDim.x >> 5); ++i) total += warps[i];
    return total;
}

// ---------------------------------------------------------------- norms: one block of threads a row of n elements

extern "C" __global__ void pla_norm(const T* x, const W* weight, const W* bias, T* y, W* mean, W* scale, Int n, W eps,
                                int centred, int biased) {
    Int row = blockIdx.x;
    const T* r = x + row * n;
    W m = 0;
    if (centred) {
        W s = 0;
        for (Int i = threadIdx.x; i < n; i += blockDim.x) s += (W)r[i];
        m = block_sum(s) / (W)n;
    }
    W q = 0;
    for (Int i = threadIdx.x; i < n; i += blockDim.x) {
        W c = (W)r[i] - m;
        q += c * c;
    }
    W k = (W)1 / sqrt(block_sum(q) / (W)n + eps);
    for (Int i = threadIdx.x; i < n; i += blockDim.x) {
        W v = ((W)r[i] - m) * k * weight[i];
        y[row * n + i] = (T)(biased ? v + bias[i] : v);
    }
    if (threadIdx.x == 0) {
        if (centred) mean[row] = m;
        scale[row] = k;
    }
}

extern "C" __global__ void pla_norm_grad(const T* x, const T* g, const W* weight, const W* mean, const W* scale, T* dx,
                                     Int n, int centred) {
    // dx = k (g w - mean of g w - h mean of g w h), h = (x - m) k
    Int row = blockIdx.x;
    const T* r = x + row * n;
    const T* d = g + row * n;
    W m = centred ? mean[row] : (W)0, k = scale[row];
    W a = 0, b = 0;
    for (Int i = threadIdx.x; i < n; i += blockDim.x) {
        W gw = (W)d[i] * weight[i];
        a += gw;
        b += gw * ((W)r[i] - m);
    }
    a = block_sum(a);
    b = block_sum(b);
    W shift = centred ? a / (W)n : (W)0, slope = b * k * k / (W)n;
    for (Int i = threadIdx.x; i < n; i += blockDim.x)
        dx[row * n + i] = (T)(((W)d[i] * weight[i] - shift - ((W)r[i] - m) * slope) * k);
}

extern "C" __global__ void pla_norm_sums(const T* x, const T* g, const W* mean, const W* scale, W* dw, W* db, Int rows,
                                     Int n, Int each, int centred) {
    // sums of g h and of g over `each` rows, a thread a column: dw and db have a row for each blockIdx.y
    Int i = (Int)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    Int first = (Int)blockIdx.y * each, last = first + each < rows ? first + each : rows;
    W a = 0, b = 0;
    for (Int row = first; row < last; ++row) {
        W d = (W)g[row * n + i], m = centred ? mean[row] : (W)0;
        a += d * ((W)x[row * n + i] - m) * scale[row];
        b += d;
    }
    dw[(Int)blockIdx.y * n + i] = a;
    db[(Int)blockIdx.y * n + i] = b;
}

// ---------------------------------------------------------------- exponentials of rows

extern "C" __global__ void pla_row_exp_sum(const T* z, const W* top, W* out, Int n) {
    Int row = blockIdx.x;
    const T* r = z + row * n;
    W m = top[row], s = 0;
    for (Int i = threadIdx.x; i < n; i += blockDim.x) s += exp((W)r[i] - m);
    s = block_sum(s);
    if (threadIdx.x == 0) out[row] = s;
}

extern "C" __global__ void pla_row_exp(const T* z, const W* top, const W* factor, T* out, Int n, int scaled) {
    Int row = blockIdx.x;
    W m = top[row], f = scaled ? factor[row] : (W)1;
    for (Int i = threadIdx.x; i < n; i += blockDim.x) out[row * n + i] = (T)(exp((W)z[row * n + i] - m) * f);
}

// ---------------------------------------------------------------- element by element

#define ELEMENTS(i, n) \
    Int i = (Int)blockIdx.x * blockDim.x + threadIdx.x; \
    if (i >= n) return;

extern "C" __global__ void pla_gelu_tanh(const T* x, T* y, Int n) {
    ELEMENTS(i, n)
    W v = (W)x[i];
    y[i] = (T)((W)0.5 * v * ((W)1 + tanh((W)0.7978845608028654 * (v + (W)0.044715 * v * v * v))));
}

extern "C" __global__ void pla_gelu_tanh_grad(const T* x, const T* g, T* dx, Int n) {
    ELEMENTS(i, n)
    W v = (W)x[i], c = (W)0.7978845608028654, a = (W)0.044715;
    W t = tanh(c * (v + a * v * v * v));
    dx[i] = (T)((W)g[i] * (W)0.5 * ((W)1 + t + v * ((W)1 - t * t) * c * ((W)1 + (W)3 * a * v * v)));
}

extern "C" __global__ void pla_gelu_erf(const T* x, T* y, Int n) {
    ELEMENTS(i, n)
    W v = (W)x[i];
    y[i] = (T)((W)0.5 * v * erfc(-v * (W)0.7071067811865476));
}

extern "C" __global__ void pla_gelu_erf_grad(const T* x, const T* g, T* dx, Int n) {
    ELEMENTS(i, n)
    W v = (W)x[i];
    W slope = (W)0.5 * erfc(-v * (W)0.7071067811865476) + v * (W)0.3989422804014327 * exp((W)-0.5 * v * v);
    dx[i] = (T)((W)g[i] * slope);
}

extern "C" __global__ void pla_swiglu(const T* z, T* y, Int n) {
    ELEMENTS(i, n)
    W gate = (W)z[2 * i], value = (W)z[2 * i + 1];
    y[i] = (T)(gate / ((W)1 + exp(-gate)) * value);
}

extern "C" __global__ void pla_swiglu_grad(const T* z, const T* g, T* dz, Int n) {
    ELEMENTS(i, n)
    W gate = (W)z[2 * i], value = (W)z[2 * i + 1], d = (W)g[i];
    W s = (W)1 / ((W)1 + exp(-gate));
    dz[2 * i] = (T)(d * value * s * ((W)1 + gate * ((W)1 - s)));
    dz[2 * i + 1] = (T)(d * gate * s);
}

extern "C" __global__ void pla_adam(T* p, const T* g, W* m, W* v, Int n, W b1, W c1, W b2, W c2, W rate, W tiny,
                                    W coupled, W decoupled, W factor) {
    ELEMENTS(i, n)
    W q = (W)p[i], d = factor * (W)g[i] + coupled * q;
    W a = b1 * m[i] + c1 * d, b = b2 * v[i] + c2 * d * d;
    m[i] = a;
    v[i] = b;
    p[i] = (T)(q - rate * a / (sqrt(b) + tiny) - decoupled * q);
}
"""
