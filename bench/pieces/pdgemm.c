/* One piece of bench/matmul.py: ScaLAPACK's p?gemm in float64.
 * usage: mpirun -n P pdgemm M N K REPEATS NB    (built by bench/matmul.py with mpicc and libscalapack-openmpi-dev)
 * Rank 0 prints JSON: the seconds of every repeat, the longest over the ranks. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

void Cblacs_pinfo(int *, int *);
void Cblacs_get(int, int, int *);
void Cblacs_gridinit(int *, const char *, int, int);
void Cblacs_gridinfo(int, int *, int *, int *, int *);
void Cblacs_gridexit(int);
int numroc_(const int *, const int *, const int *, const int *, const int *);
void descinit_(int *, const int *, const int *, const int *, const int *, const int *, const int *, const int *,
               const int *, int *);
void pdgemm_(const char *, const char *, const int *, const int *, const int *, const double *, const double *,
             const int *, const int *, const int *, const double *, const int *, const int *, const int *,
             const double *, double *, const int *, const int *, const int *);

static const int zero = 0, one = 1;

/* A block-cyclic matrix of uniform random numbers from -1 to 1. */
static double *matrix(int rows, int cols, int nb, int context, int *desc) {
    int pr, pc, r, c, info;
    Cblacs_gridinfo(context, &pr, &pc, &r, &c);
    int mine = numroc_(&rows, &nb, &r, &zero, &pr), wide = numroc_(&cols, &nb, &c, &zero, &pc);
    int lead = mine > 1 ? mine : 1;
    descinit_(desc, &rows, &cols, &nb, &nb, &zero, &zero, &context, &lead, &info);
    if (info) MPI_Abort(MPI_COMM_WORLD, 1);
    size_t count = (size_t)lead * (wide > 1 ? wide : 1);
    double *block = malloc(count * sizeof *block);
    if (!block) MPI_Abort(MPI_COMM_WORLD, 1);
    for (size_t i = 0; i < count; i++) block[i] = 2 * drand48() - 1;
    return block;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    if (argc != 6) MPI_Abort(MPI_COMM_WORLD, 2);
    int m = atoi(argv[1]), n = atoi(argv[2]), k = atoi(argv[3]), repeats = atoi(argv[4]), nb = atoi(argv[5]);
    int rank, ranks, context, pr = 1;
    Cblacs_pinfo(&rank, &ranks);
    for (int d = 1; d * d <= ranks; d++)
        if (ranks % d == 0) pr = d; /* the squarest grid, its longer side along the longer of m and n */
    if (m > n) pr = ranks / pr;
    Cblacs_get(-1, 0, &context);
    Cblacs_gridinit(&context, "Row", pr, ranks / pr);
    srand48(rank + 1);
    int da[9], db[9], dc[9];
    double *a = matrix(m, k, nb, context, da), *b = matrix(k, n, nb, context, db), *c = matrix(m, n, nb, context, dc);
    double alpha = 1, beta = 0;
    if (rank == 0) printf("{\"grid\": [%d, %d], \"nb\": %d, \"seconds\": [", pr, ranks / pr, nb);
    for (int i = 0; i <= repeats; i++) { /* the first one is not counted */
        MPI_Barrier(MPI_COMM_WORLD);
        double start = MPI_Wtime(), longest;
        pdgemm_("N", "N", &m, &n, &k, &alpha, a, &one, &one, da, b, &one, &one, db, &beta, c, &one, &one, dc);
        double took = MPI_Wtime() - start;
        MPI_Reduce(&took, &longest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
        if (rank == 0 && i) printf("%s%.6f", i > 1 ? ", " : "", longest);
    }
    if (rank == 0) printf("]}\n");
    free(a), free(b), free(c);
    Cblacs_gridexit(context);
    MPI_Finalize();
    return 0;
}
