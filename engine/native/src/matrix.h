// A weight matrix in panels, and products with it.
#pragma once

#include "dot_tile.h"

namespace baton {

struct Matrix {
    int32_t format;
    int64_t n, k;         // y[n] = x[k] @ W.T
    int64_t panel_count;  // of PANEL columns each, the last filled up with zeros
    int64_t steps;        // per panel; k is filled up with zeros
    int64_t panel_bytes;
    char* panels;
    void* arena;  // that the panels lie in
    bool is_placed;  // panels, scales, zeros and factors lie in memory that is not the matrix's
    // W = scale * (code - zero), by panel and group: [panel_count][group_count][PANEL]. Null: 1 and 0.
    int64_t group_count, group_k;
    float* scales;
    float* zeros;
    float code_offset;  // without zeros: minus the zero of all groups
    // Where weights are scaled before they are multiplied, else null: of each column a power of two that no weight
    // reaches, [panel_count][PANEL], and after these `halves_unit` by each.
    float* factors;
    float* bias;     // [panel_count * PANEL] or null
    int32_t* offsets;  // quad8, as the scales: what is added to a sum, for activations that are stored with an offset
    int32_t* order;  // [k]: the matrix's column i belongs to input order[i]; null: i
    Codebook book;
};

// Rows of activations: row i is base + (index ? index[i] : i) * stride elements.
struct Rows {
    const void* base;
    int64_t count;
    int64_t stride;
    const int32_t* index;
    int32_t dtype;  // or QUADS: steps of rounded activations, of which `stride` counts
};
constexpr int32_t QUADS = 2;

// Result of the sums: + bias, + residual, rounded to `dtype`. With `gated` the columns are those of
// gate and then of up, and the result has half as many.
struct Output {
    void* base;
    int64_t stride;
    int32_t dtype;
    const void* residual;  // same stride and dtype as the output, may be the output; or null
    int32_t activation;    // below zero: none
};

struct Product {
    const Matrix* matrix;
    Rows rows;
    Output out;
};

// All products, their parts shared out over the threads. False: a shape or dtype that is not supported.
bool multiply(const Product* products, int64_t count);

}  // namespace baton
