/* One piece of bench/linalg.py: ScaLAPACK's routines in float64, or with -DSINGLE in float32, on the squarest grid.
 * usage: mpirun -n P scalapack ROUTINE M N REPEATS NB   (built by bench/linalg.py with mpicc and
 * libscalapack-openmpi-dev)
 * ROUTINE: cholesky, lu, solve, triangular, qr, pivoted-qr, lstsq, eigh, svd.  qr and pivoted-qr make Q and R, solve,
 * triangular and lstsq have 16 right-hand sides, and eigh and svd make vectors.  Rank 0 prints JSON: the seconds of
 * every repeat, the longest over the ranks. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void Cblacs_pinfo(int *, int *);
void Cblacs_get(int, int, int *);
void Cblacs_gridinit(int *, const char *, int, int);
void Cblacs_gridinfo(int, int *, int *, int *, int *);
void Cblacs_gridexit(int);
int numroc_(const int *, const int *, const int *, const int *, const int *);
void descinit_(int *, const int *, const int *, const int *, const int *, const int *, const int *, const int *,
               const int *, int *);
typedef const int *I;
#ifdef SINGLE
typedef float Real;
#define P(name) ps##name##_
#else
typedef double Real;
#define P(name) pd##name##_
#endif
void P(potrf)(const char *, I, Real *, I, I, I, int *);
void P(getrf)(I, I, Real *, I, I, I, int *, int *);
void P(gesv)(I, I, Real *, I, I, I, int *, Real *, I, I, I, int *);
void P(geqrf)(I, I, Real *, I, I, I, Real *, Real *, I, int *);
void P(geqpf)(I, I, Real *, I, I, I, int *, Real *, Real *, I, int *);
void P(orgqr)(I, I, I, Real *, I, I, I, Real *, Real *, I, int *);
void P(trtrs)(const char *, const char *, const char *, I, I, Real *, I, I, I, Real *, I, I, I, int *);
void P(gels)(const char *, I, I, I, Real *, I, I, I, Real *, I, I, I, Real *, I, int *);
void P(syevd)(const char *, const char *, I, Real *, I, I, I, Real *, Real *, I, I, I, Real *, I, int *, I,
              int *);
void P(gesvd)(const char *, const char *, I, I, Real *, I, I, I, Real *, Real *, I, I, I, Real *, I, I, I,
              Real *, I, int *);

static const int zero = 0, one = 1, columns = 16;
static int rows_of_grid, columns_of_grid, my_row, my_column, nb, context;

typedef struct {
    Real *first, *now;
    size_t count;
    int desc[9];
} Matrix;

static void fail(const char *what, int info) {
    if (info) {
        fprintf(stderr, "%s: info = %d\n", what, info);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
}

/* A block-cyclic matrix of uniform random numbers from -1 to 1, `more` on its diagonal. */
static Matrix matrix(int m, int n, double more) {
    Matrix a;
    int info, mine = numroc_(&m, &nb, &my_row, &zero, &rows_of_grid);
    int wide = numroc_(&n, &nb, &my_column, &zero, &columns_of_grid), lead = mine > 1 ? mine : 1;
    descinit_(a.desc, &m, &n, &nb, &nb, &zero, &zero, &context, &lead, &info);
    fail("descinit", info);
    a.count = (size_t)lead * (wide > 1 ? wide : 1);
    a.first = malloc(a.count * sizeof(Real));
    a.now = malloc(a.count * sizeof(Real));
    if (!a.first || !a.now) MPI_Abort(MPI_COMM_WORLD, 1);
    for (size_t i = 0; i < a.count; i++) a.first[i] = 2 * drand48() - 1;
    for (int j = 0; j < wide; j++)
        for (int i = 0; i < mine; i++) {
            int row = (i / nb * rows_of_grid + my_row) * nb + i % nb;
            if (row == (j / nb * columns_of_grid + my_column) * nb + j % nb) a.first[i + (size_t)j * lead] += more;
        }
    return a;
}

static Real *room(double size) {
    Real *found = malloc((size_t)(size > 1 ? size : 1) * sizeof(Real));
    if (!found) MPI_Abort(MPI_COMM_WORLD, 1);
    return found;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    if (argc != 6) MPI_Abort(MPI_COMM_WORLD, 2);
    const char *what = argv[1];
    int m = atoi(argv[2]), n = atoi(argv[3]), repeats = atoi(argv[4]), rank, ranks, pr = 1, info = 0;
    nb = atoi(argv[5]);
    Cblacs_pinfo(&rank, &ranks);
    for (int d = 1; d * d <= ranks; d++)
        if (ranks % d == 0) pr = d;
    if (m > 4 * n) pr = ranks; /* a tall matrix: all ranks along its rows */
    Cblacs_get(-1, 0, &context);
    Cblacs_gridinit(&context, "Row", pr, ranks / pr);
    Cblacs_gridinfo(context, &rows_of_grid, &columns_of_grid, &my_row, &my_column);
    srand48(rank + 1);
    int k = m < n ? m : n, eigh = !strcmp(what, "eigh"), svd = !strcmp(what, "svd");
    int heavy = !strcmp(what, "cholesky") || !strcmp(what, "triangular"); /* on the diagonal */
    Matrix a = matrix(m, n, heavy ? 2.0 * n : 0), b = matrix(m, columns, 0), u, v;
    int *pivots = malloc((size_t)(m + n + nb) * sizeof(int));
    Real *tau = room(n + nb), *values = room(k);
    if (eigh || svd) u = matrix(m, k, 0);
    if (svd) v = matrix(k, n, 0);
    Real ask[2] = {0, 0}, more[2] = {0, 0}; /* what the work arrays need */
    int minus = -1, ints[2] = {1, 1};
    int pivoting = !strcmp(what, "pivoted-qr");
    if (!strcmp(what, "qr") || pivoting) {
        if (pivoting)
            P(geqpf)(&m, &n, a.now, &one, &one, a.desc, pivots, tau, ask, &minus, &info);
        else
            P(geqrf)(&m, &n, a.now, &one, &one, a.desc, tau, ask, &minus, &info);
        P(orgqr)(&m, &k, &k, a.now, &one, &one, a.desc, tau, more, &minus, &info);
        if (more[0] > ask[0]) ask[0] = more[0];
    } else if (!strcmp(what, "lstsq"))
        P(gels)("N", &m, &n, &columns, a.now, &one, &one, a.desc, b.now, &one, &one, b.desc, ask, &minus, &info);
    else if (eigh)
        P(syevd)("V", "L", &n, a.now, &one, &one, a.desc, values, u.now, &one, &one, u.desc, ask, &minus, ints, &minus,
                 &info);
    else if (svd)
        P(gesvd)("V", "V", &m, &n, a.now, &one, &one, a.desc, values, u.now, &one, &one, u.desc, v.now, &one, &one,
                 v.desc, ask, &minus, &info);
    int size = (int)ask[0] + 8 * n + 1024, whole = ints[0] + 8 * n + 1024; /* pdsyevd asks for too little */
    Real *work = room(size);
    int *steps = malloc((size_t)whole * sizeof(int));
    if (rank == 0) printf("{\"grid\": [%d, %d], \"nb\": %d, \"seconds\": [", pr, ranks / pr, nb);
    for (int i = 0; i <= repeats; i++) { /* the first one is not counted */
        memcpy(a.now, a.first, a.count * sizeof(Real));
        memcpy(b.now, b.first, b.count * sizeof(Real));
        MPI_Barrier(MPI_COMM_WORLD);
        double start = MPI_Wtime(), longest;
        if (!strcmp(what, "cholesky"))
            P(potrf)("L", &n, a.now, &one, &one, a.desc, &info);
        else if (!strcmp(what, "lu"))
            P(getrf)(&m, &n, a.now, &one, &one, a.desc, pivots, &info);
        else if (!strcmp(what, "solve"))
            P(gesv)(&n, &columns, a.now, &one, &one, a.desc, pivots, b.now, &one, &one, b.desc, &info);
        else if (!strcmp(what, "triangular"))
            P(trtrs)("U", "N", "N", &n, &columns, a.now, &one, &one, a.desc, b.now, &one, &one, b.desc, &info);
        else if (!strcmp(what, "qr") || pivoting) {
            if (pivoting)
                P(geqpf)(&m, &n, a.now, &one, &one, a.desc, pivots, tau, work, &size, &info);
            else
                P(geqrf)(&m, &n, a.now, &one, &one, a.desc, tau, work, &size, &info);
            P(orgqr)(&m, &k, &k, a.now, &one, &one, a.desc, tau, work, &size, &info);
        } else if (!strcmp(what, "lstsq"))
            P(gels)("N", &m, &n, &columns, a.now, &one, &one, a.desc, b.now, &one, &one, b.desc, work, &size, &info);
        else if (eigh)
            P(syevd)("V", "L", &n, a.now, &one, &one, a.desc, values, u.now, &one, &one, u.desc, work, &size, steps,
                     &whole, &info);
        else if (svd)
            P(gesvd)("V", "V", &m, &n, a.now, &one, &one, a.desc, values, u.now, &one, &one, u.desc, v.now, &one, &one,
                     v.desc, work, &size, &info);
        else
            MPI_Abort(MPI_COMM_WORLD, 2);
        fail(what, info);
        double took = MPI_Wtime() - start;
        MPI_Reduce(&took, &longest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
        if (rank == 0 && i) printf("%s%.6f", i > 1 ? ", " : "", longest);
    }
    if (rank == 0) printf("]}\n");
    Cblacs_gridexit(context);
    MPI_Finalize();
    return 0;
}
